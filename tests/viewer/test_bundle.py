"""A bundle opens from a disk: every link leads to a file in it, and no page asks for anything else."""

import errno
import os
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from areal.api.errors import ArealError
from areal.cli.main import main
from areal.store.filters import parse_filter
from areal.store.schema import STORE_FILE
from areal.store.search import ALL
from areal.viewer.bundle import write_bundle
from areal.viewer.runs import Runs
from tests.viewer.viewed_runs import LONG, write_run


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("runs")
    write_run(place / "small" / "one")
    write_run(place / "small" / "two", lr=6e-4)
    return place


class Addresses(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [value for name, value in attrs if name in ("href", "src", "action") and value]


@pytest.mark.parametrize("words", ["", "group:1"])
def test_every_address_in_a_bundle_is_a_file_of_it(runs: Path, tmp_path: Path, words: str) -> None:
    target = tmp_path / "bundle"
    written = write_bundle(Runs([runs]), target, parse_filter(words), 100)
    pages = list(target.rglob("*.html"))
    assert len(pages) <= written
    for page in pages:
        for address in Addresses(page.read_text(encoding="utf-8")).found:
            parts = urlsplit(address)
            if parts.scheme == "data" or not parts.path:
                continue
            assert not parts.scheme, address
            assert not parts.path.startswith("/"), address
            assert (page.parent / unquote(parts.path)).resolve().is_relative_to(target.resolve())
            assert (page.parent / unquote(parts.path)).is_file(), (page, address)


def test_a_bundle_has_the_newest_episodes_and_their_long_messages(runs: Path, tmp_path: Path) -> None:
    write_bundle(Runs([runs]), tmp_path / "bundle", ALL, 3)
    episodes = tmp_path / "bundle" / "r" / "small.one" / "episodes"
    assert sorted(path.stem for path in episodes.glob("*.html")) == ["11", "12", "13"]
    assert (episodes / "13" / "1.txt").read_text() == LONG


def test_only_a_bundle_is_overwritten(runs: Path, tmp_path: Path) -> None:
    write_bundle(Runs([runs]), tmp_path / "bundle", ALL, 1)
    write_bundle(Runs([runs]), tmp_path / "bundle", ALL, 1)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").touch()
    with pytest.raises(ArealError, match="has other files"):
        write_bundle(Runs([runs]), tmp_path / "other", ALL, 1)


def test_the_command_writes_one(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["view", str(runs), "--bundle", str(tmp_path / "bundle"), "--episodes", "2"]) == 0
    assert str(tmp_path / "bundle" / "index.html") in capsys.readouterr().out
    assert main(["view", str(tmp_path / "nothing")]) == 2
    assert "needs directories" in capsys.readouterr().err


def test_a_bundle_that_a_full_disk_cut_short_is_written_again(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def copy(source: Path, target: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(source), None, str(target))

    words = ["view", str(runs), "--bundle", str(tmp_path / "pages")]
    with monkeypatch.context() as full:
        full.setattr("areal.viewer.bundle.shutil.copyfile", copy)
        assert main(words) == 2
    assert f"areal: cannot use {tmp_path}/pages/static/" in capsys.readouterr().err
    assert main(words) == 0


def test_a_bundle_does_not_take_the_place_of_a_file(runs: Path, tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("kept")
    with pytest.raises(ArealError, match="is a file; choose another"):
        write_bundle(Runs([runs]), tmp_path / "notes", ALL, 1)
    assert (tmp_path / "notes").read_text() == "kept"


def test_without_a_run_that_can_be_read_there_is_no_bundle_and_the_old_one_stays(runs: Path, tmp_path: Path) -> None:
    target, damaged = tmp_path / "pages", tmp_path / "runs" / "experiment" / "trial"
    write_bundle(Runs([runs]), target, ALL, 1)
    damaged.mkdir(parents=True)
    with pytest.raises(ArealError, match="found none; give"):
        write_bundle(Runs([damaged.parent]), target, ALL, 1)
    (damaged / STORE_FILE).write_bytes(b"no database")
    with pytest.raises(ArealError, match=r"found none \(.*trial: "):
        write_bundle(Runs([damaged.parent]), target, ALL, 1)
    assert (target / "index.html").exists()
