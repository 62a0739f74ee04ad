import json
from pathlib import Path

import pytest
from rich.console import Console

from areal.api.errors import NothingAccepted, RejectReason
from areal.api.messages import GroupResult, Rejection
from areal.cli.eval import _table
from areal.cli.main import main
from areal.config.experiment import GRPOConfig
from areal.config.loader import build
from areal.trainer.comparison import Measured, _require_some, _without_trainer
from areal.trainer.evaluation import Difference, Evaluation

AGENT = "areal.workflow.openai.math_agent.MathAgent"
WORDS = ("--workflow", AGENT, "--data", "builtin:sort-digits")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--data", "builtin:sums"], "--workflow must name what plays the tasks"),
        (["--workflow", AGENT], "--data must name the tasks"),
        (["--workflow", "no.Agent", "--data", "builtin:sums"], "workflow 'no.Agent' cannot be imported"),
        ([*WORDS, "--size", "0"], "--size must be >= 1, got 0"),
        ([*WORDS, "--n-samples", "0"], "--n-samples must be >= 1, got 0"),
        ([*WORDS, "--split", "nowhere"], "no split 'nowhere'"),
        ([*WORDS, "--model", "./nowhere"], "no model directory at './nowhere'"),
        ([*WORDS, "rollout.agent.mode=online"], "agents outside"),
    ],
)
def test_words_that_make_no_sense_end_with_code_2(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", *words]) == 2
    captured = capsys.readouterr()
    assert said in captured.err
    assert captured.out == ""


def measured(model: str, *rewards: float, to: Measured | None = None) -> Measured:
    evaluation = Evaluation(sum(rewards) / len(rewards), len(rewards), 0, True, interval=[0.1, 0.9])
    evaluation.task_rewards.extend(rewards)
    evaluation.pass_at_k.extend([0.5, 0.75, 0.8, 0.9])
    return Measured(model, evaluation, 1.0, {}, Difference.of(to.evaluation, evaluation) if to else None)


def test_models_stand_side_by_side_with_their_difference() -> None:
    first = measured("one", 0, 1, 0, 1)
    console = Console(width=100, record=True)
    console.print(_table([first, measured("two", 1, 1, 0, 1, to=first)]))
    head, one, two = (" ".join(line.split()) for line in console.export_text().splitlines())
    assert head == "success 95 % pass@2 pass@4 to the first (95 %)"
    assert one == "1 0.500 0.100–0.900 0.750 0.900"
    assert two.startswith("2 0.750 0.100–0.900 0.750 0.900 +0.250 (")


def test_a_model_of_which_no_episode_counts_is_told_with_the_cause() -> None:
    rejected = Rejection(RejectReason.AGENT_ERROR, "KeyError: 'answer'")
    with pytest.raises(NothingAccepted, match=r"all 2 episodes of m were rejected \(agent_error 2\).*KeyError"):
        _require_some("m", [GroupResult(-1, [], [rejected], {}), GroupResult(-2, [], [rejected], {})], [rejected] * 2)


def test_settings_of_training_do_not_matter(tmp_path: Path) -> None:
    values = {
        "actor": {"backend": "fsdp:d8", "gpus": 1, "offload": True, "use_decoupled_loss": True},
        "rollout": {"when_stale": "train", "device": "cpu"},
        "critic": {"path": "x"},
    }
    config = build(GRPOConfig, {**values, "actor": {**values["actor"], "group_baseline": "none"}})
    bare = _without_trainer(config, tmp_path)
    assert (bare.actor.backend, bare.actor.gpus, bare.critic.path) == ("", None, "")
    assert bare.gconfig == config.gconfig


@pytest.mark.slow
def test_the_same_model_twice_is_the_same_task_by_task(tiny_math: Path, capfd: pytest.CaptureFixture[str]) -> None:
    models = ("--model", "builtin:tiny-math", "--model", str(tiny_math))
    words = ("--size", "6", "--n-samples", "2", "--json", "gconfig.max_new_tokens=16")
    assert main(["eval", *models, *WORDS, *words]) == 0
    captured = capfd.readouterr()
    found = json.loads(captured.out)
    one, two = found["models"]
    assert (found["tasks"], found["n_samples"], one["episodes"], one["rejected"]) == (6, 2, 12, 0)
    assert one["task_rewards"] == two["task_rewards"]
    assert len(one["pass_at_k"]) == 2
    assert (one["difference"], two["difference"]["mean"]) == (None, 0.0)
    assert captured.err.count("12 episodes") == 2
