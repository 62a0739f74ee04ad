import json

import pytest

from areal.cli.main import main


def test_all_words_must_occur_in_the_name_or_the_meaning(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "Timeout", "episode"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("rollout.agent.timeout_seconds=600  (number, in seconds)\n    Seconds; an episode")
    assert "body_timeout" not in shown


def test_without_a_word_all_settings_are_listed_in_a_narrow_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    assert main(["config"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert "rollout.when_stale=wait" in shown
    assert all(len(line) <= 40 for line in shown if line.startswith(" ") and " " in line.strip())


def test_unknown_word_is_answered_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "timout"]) == 2
    assert capsys.readouterr().err.endswith("did you mean timeout?\n")


def test_json_is_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "when_stale", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["settings"]
    assert found[0]["name"] == "rollout.when_stale"
    assert found[0]["choices"] == ["wait", "drop", "train"]


def test_settings_of_supervised_fine_tuning_have_its_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "actor.optimizer.lr", "--sft", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["settings"][0]["default"] == 1e-3


def test_schema_of_some_settings_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "seed", "--json-schema"]) == 2
    assert "leave it out" in capsys.readouterr().err
