"""Another reward function is run as a reward function is, and what would change is told; the run stays as it is."""

import hashlib
import sys
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from areal.cli.main import main
from areal.store.schema import STORE_FILE
from areal.viewer.app import Viewer
from areal.viewer.rescoring import Rescored, advantages_of, read_rescored
from areal.viewer.server import Guarded
from tests.viewer.viewed_runs import write_run

REWARDS = '''
import time

def by_length(prompt, completion, prompt_ids, completion_ids, answer, **task):
    """Tells the samples of group 0 apart, and no others that it is called for."""
    assert answer == "7 <b>" and task["messages"] and prompt and len(completion_ids) > 0
    return float(completion == "seven!")

def fails(prompt, completion, prompt_ids, completion_ids, **task):
    raise ValueError("not <today>")

def hangs(prompt, completion, prompt_ids, completion_ids, **task):
    time.sleep(60)
'''


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "other_rewards.py").write_text(REWARDS)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "other_rewards", raising=False)
    return write_run(tmp_path / "runs" / "small" / "one")


def page_of(run: Path, name: str) -> str:
    client = TestClient(Guarded(Viewer([run]).asgi()), base_url="http://127.0.0.1")
    answer = client.get(f"/r/small.one/rescored/{name}")
    assert answer.status_code == 200
    return answer.text


@pytest.mark.slow
def test_old_and_new_rewards_are_compared_group_by_group(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = hashlib.sha256((run / STORE_FILE).read_bytes()).digest()
    words = ["rescore", str(run), "--reward", "other_rewards.by_length", "--filter", "step:1"]
    assert main(words) == 0
    assert "1 would gain a signal and 1 would lose it" in capsys.readouterr().out
    found = read_rescored(run, "other_rewards.by_length")
    assert (found.gained, found.lost, found.failures) == ([0], [1], 0)
    assert [each.new for each in found.episodes] == [0.0, 1.0, 0.0, 0.0]
    assert [each.new_advantage for each in found.episodes] == [-0.5, 0.5, 0.0, 0.0]
    assert "1 group would gain a signal and 1 group would lose it" in page_of(run, "other_rewards.by_length")
    assert hashlib.sha256((run / STORE_FILE).read_bytes()).digest() == before
    assert main(words) == 2
    assert main([*words, "--force"]) == 0


@pytest.mark.slow
def test_a_function_that_fails_or_hangs_is_told_of_each_episode(run: Path) -> None:
    assert main(["rescore", str(run), "--reward", "other_rewards.fails", "--filter", "group:0", "--name", "f"]) == 0
    assert "not &lt;today&gt;" in page_of(run, "f")
    hanging = ["rescore", str(run), "--reward", "other_rewards.hangs", "--filter", "id:1", "--name", "h"]
    assert main([*hanging, "--timeout", "0.5"]) == 0
    (episode,) = read_rescored(run, "h").episodes
    assert episode.new is None
    assert "0.5 s" in episode.failure


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--reward", "nothing"], "must be an import string"),
        (["--reward", "other_rewards.gone"], "it has by_length"),
        (["--reward", "other_rewards.fails", "--name", "../x"], "a name is letters"),
        (["--reward", "other_rewards.fails", "--filter", "rewrd<1"], "did you mean reward?"),
        (["--reward", "other_rewards.fails", "--filter", "id:9999"], "there is nothing to score"),
        (["--reward", "other_rewards.fails", "--timeout", "0"], "--timeout must be > 0"),
        (["--reward", "other_rewards.time", "--name", "t"], "--reward must name a function"),
    ],
)
def test_what_cannot_be_scored_is_refused_in_one_line(
    run: Path, capsys: pytest.CaptureFixture[str], words: list[str], complaint: str
) -> None:
    assert main(["rescore", str(run), *words]) == 2
    said = capsys.readouterr().err
    assert complaint in said
    assert said.count("\n") == 1


def test_a_damaged_result_is_told(run: Path) -> None:
    (run / "rescored").mkdir()
    (run / "rescored" / "bad.json").write_text('{"episodes": 3}')
    client = TestClient(Guarded(Viewer([run]).asgi()), base_url="http://127.0.0.1")
    answer = client.get("/r/small.one/rescored/bad")
    assert answer.status_code == 500
    assert "cannot be read" in answer.text


@pytest.mark.parametrize(
    ("baseline", "norm", "expected"),
    [("mean", "none", [-0.5, 0.5]), ("none", "none", [0.0, 1.0]), ("mean", "group", [-0.7071, 0.7071])],
)
def test_advantages_follow_the_settings_of_the_run(baseline: str, norm: str, expected: list[float]) -> None:
    found = Rescored("n", "f", "", 0.0, baseline, norm)
    assert advantages_of([0.0, 1.0], found) == pytest.approx(expected, abs=1e-3)
    assert advantages_of([0.1 + 0.2] * 3, Rescored("n", "f", "", 0.0, "mean", "group")) == [0.0, 0.0, 0.0]
