"""A browser, and viewers for it: of a real short run, of small runs with hostile text, of 100,000 episodes, of files.

`make test-viewer` installs what this needs. Stores that take long to make, axe-core and the screenshots are kept in
`.venv/viewer-tests`.
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from areal.store.search import ALL
from areal.viewer.bundle import write_bundle
from areal.viewer.runs import Runs
from benchmarks.store import write
from tests.viewer.viewed_runs import write_run

ROOT = Path(__file__).parents[2]
KEPT = Path(os.environ.get("AREAL_VIEWER_TESTS", ROOT / ".venv" / "viewer-tests"))
CHROMIUM = "/usr/bin/chromium"
CLOSED = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--headless",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
]
"""A browser that asks nobody for anything."""
EPISODES = 100_000
TRAIN_SECONDS = 600.0
START_SECONDS = 60.0


@contextmanager
def serving(*places: Path) -> Iterator[str]:
    """`areal view` in a process of its own; yields its address."""
    words = [sys.executable, "-m", "areal.cli.main", "view", *map(str, places), "--port", "0"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        try:
            found = re.search(r"http://\S+", process.stdout.readline())
            assert found is not None, "the viewer did not start"
            yield found[0].rstrip("/")
        finally:
            process.terminate()
            process.wait(START_SECONDS)


@pytest.fixture(scope="session")
def real_runs() -> Path:
    """Two short runs of an example with tools; made once."""
    place = KEPT / "runs"
    for trial, lr in (("one", "1.5e-4"), ("two", "3e-4")):
        if not (place / "tool-use" / trial / "summary.json").exists():
            settings = [f"trial_name={trial}", "total_train_steps=8", "evaluator.freq_steps=4", "valid_dataset.size=32"]
            words = ["--config", "examples/tool_use/config.yaml", *settings, f"output_dir={place}"]
            command = [sys.executable, "-m", "areal.cli.main", "train", *words, f"actor.optimizer.lr={lr}"]
            subprocess.run(command, check=True, cwd=ROOT, timeout=TRAIN_SECONDS, capture_output=True)
    return place


@pytest.fixture(scope="session")
def small_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("runs")
    write_run(place / "small" / "one")
    write_run(place / "small" / "two", lr=6e-4)
    return place


@pytest.fixture(scope="session")
def many_episodes() -> Path:
    place = KEPT / "generated" / "many"
    if not (place / "complete").exists():
        place.mkdir(parents=True, exist_ok=True)
        for path in place.glob("run.db*"):
            path.unlink()
        write(place, EPISODES)
        (place / "complete").touch()
    return place


@pytest.fixture(scope="session")
def real(real_runs: Path) -> Iterator[str]:
    with serving(real_runs) as address:
        yield address


@pytest.fixture(scope="session")
def small(small_runs: Path) -> Iterator[str]:
    with serving(small_runs) as address:
        yield address


@pytest.fixture(scope="session")
def many(many_episodes: Path) -> Iterator[str]:
    with serving(many_episodes) as address:
        yield f"{address}/r/generated.many"


@pytest.fixture(scope="session")
def files(small_runs: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    target = tmp_path_factory.mktemp("bundle") / "pages"
    write_bundle(Runs([small_runs]), target, ALL, 100)
    return target.as_uri()


@pytest.fixture
def playground() -> Iterator[str]:
    """The page of a served model, with its key."""
    words = [sys.executable, "-m", "areal.cli.main", "serve", "--model", "builtin:tiny-math", "--port", "0"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        try:
            lines = [process.stdout.readline() for _ in range(3)]
            yield lines[2].removeprefix("talk to it at ").strip()
        finally:
            process.terminate()
            process.wait(START_SECONDS)


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=CLOSED)
        yield browser
        browser.close()


class Watched:
    """A page, and everything that went wrong on it."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.wrong: list[str] = []
        self.asked: list[str] = []
        page.on("console", lambda said: self.wrong.append(said.text) if said.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: self.wrong.append(str(error)))
        page.on("dialog", lambda dialog: (self.wrong.append(f"a dialog: {dialog.message}"), dialog.dismiss()))
        page.on("request", lambda request: self.asked.append(request.url))


@pytest.fixture
def watched(browser: Browser) -> Iterator[Watched]:
    """In a window of 1280 pixels; nothing may go wrong in it."""
    context = browser.new_context(viewport={"width": 1280, "height": 850})
    made = Watched(context.new_page())
    yield made
    context.close()
    assert made.wrong == []


@pytest.fixture(scope="session")
def axe() -> str:
    return (KEPT / "axe.min.js").read_text()


def serious(page: Page, axe: str) -> list[Any]:
    """What axe-core finds on the page that keeps somebody from using it."""
    page.evaluate(axe)
    found = page.evaluate("async () => (await axe.run(document)).violations")
    return [
        (each["id"], each["help"], [node["html"][:200] for node in each["nodes"][:3]])
        for each in found
        if each["impact"] in ("serious", "critical")
    ]
