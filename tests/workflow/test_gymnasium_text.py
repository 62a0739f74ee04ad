"""Environments of the real gymnasium library as conversations: what is shown, what an answer does, what it earns."""

import re
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from areal.api.errors import ConfigError, WorkflowError
from areal.config.rollout import GenerationHyperparameters
from areal.workflow.gymnasium_text import NOT_AN_ACTION, GymnasiumWorkflow

gymnasium = pytest.importorskip("gymnasium")

SORTING = "examples.text_environment.sorting:SortingGame-v0"
LAKE = {"env": "FrozenLake-v1", "env_kwargs": {"render_mode": "ansi", "is_slippery": False}, "seed": 1}
GCONFIG = GenerationHyperparameters(max_new_tokens=32)


@pytest.fixture(autouse=True)
def root_is_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(Path(__file__).parents[2]), *sys.path])


def workflow(tokenizer: Any, **settings: Any) -> GymnasiumWorkflow:
    return GymnasiumWorkflow(GCONFIG, tokenizer, **settings)


def sorts(prompt: str) -> str:
    return "".join(sorted(re.findall(r"Sort (\d+)", prompt)[-1]))


def returns(rows: dict[str, Any]) -> list[float]:
    """What the first trained token of each completion earned."""
    return [float(row[mask.bool()][0]) for row, mask in zip(rows["returns"], rows["loss_mask"], strict=True)]


async def test_each_step_shows_its_observation_and_pays_its_completion(tokenizer: Any, speaker: Any) -> None:
    says = speaker(sorts)
    rows = await workflow(tokenizer, env=SORTING).arun_episode(says.engine(), {"seed": 3})
    assert [prompt.count("Sort ") for prompt in says.prompts] == [1, 2, 3]
    assert says.prompts[1].startswith(says.prompts[0] + sorts(says.prompts[0]))
    assert rows["rewards"].tolist() == [1.0, 1.0, 1.0]
    assert returns(rows) == [3.0, 2.0, 1.0]


async def test_a_seed_repeats_the_environment_and_a_task_names_its_own(tokenizer: Any, speaker: Any) -> None:
    first = []
    for seed in (3, 3, 4):
        says = speaker(lambda prompt: "0")
        task = {"env": SORTING, "env_kwargs": {"length": 9}, "seed": seed}
        await workflow(tokenizer).arun_episode(says.engine(), task)
        first.append(says.prompts[0])
    assert first[0] == first[1] != first[2]


async def test_an_answer_without_an_action_costs_a_turn_and_no_step(tokenizer: Any, speaker: Any) -> None:
    says = speaker(lambda prompt: sorts(prompt) if NOT_AN_ACTION in prompt else "no")
    rows = await workflow(tokenizer, env=SORTING, max_turns=2).arun_episode(says.engine(), {"seed": 3})
    assert NOT_AN_ACTION in says.prompts[1]
    assert rows["rewards"].tolist() == [0.0, 1.0]


async def test_a_discrete_action_is_the_last_number_and_ansi_is_shown(tokenizer: Any, speaker: Any) -> None:
    moves = iter([1, 1, 2, 2, 1, 2])  # down, down, right, right, down, right: the goal of the 4 by 4 map
    says = speaker(lambda prompt: f"{next(moves)}")
    rows = await workflow(tokenizer, turn_discount=0.5).arun_episode(says.engine(), LAKE)
    assert len(says.prompts) == 6
    assert "FFFH" in says.prompts[0]
    assert returns(rows) == [0.5**power for power in (5, 4, 3, 2, 1, 0)]


@pytest.mark.parametrize("answer", ["2.0", "go 1.2", "10000000001", "9" * 20])
async def test_part_of_a_number_is_no_action(tokenizer: Any, speaker: Any, answer: str) -> None:
    says = speaker(lambda prompt: answer)
    await workflow(tokenizer, max_turns=2).arun_episode(says.engine(), LAKE)
    assert NOT_AN_ACTION in says.prompts[1]


async def test_a_parser_of_the_users_makes_the_action(tokenizer: Any, speaker: Any) -> None:
    says = speaker(lambda prompt: "7")
    await workflow(tokenizer, parse=lambda text: None, max_turns=3).arun_episode(says.engine(), LAKE)
    assert says.prompts[2].count(NOT_AN_ACTION) == 2


async def test_a_step_that_hangs_rejects_its_episode(tokenizer: Any, speaker: Any) -> None:
    released = threading.Event()
    hangs = workflow(tokenizer, env=SORTING, parse=lambda text: released.wait(20), step_seconds=0.2)
    try:
        with pytest.raises(WorkflowError, match=r"step of the environment must end within step_seconds=0\.2"):
            await hangs.arun_episode(speaker(sorts).engine(), {"seed": 3})
    finally:
        released.set()


@pytest.mark.parametrize(
    ("task", "message"),
    [({}, "there is no environment"), ({"env": "Nowhere-v0"}, "gymnasium cannot make 'Nowhere-v0'")],
)
async def test_what_is_no_environment_is_refused(tokenizer: Any, speaker: Any, task: Any, message: str) -> None:
    with pytest.raises(WorkflowError, match=message):
        await workflow(tokenizer).arun_episode(speaker(sorts).engine(), task)


def test_settings_that_make_no_sense_are_refused(tokenizer: Any) -> None:
    with pytest.raises(ConfigError, match="max_turns must be >= 1, got 0"):
        workflow(tokenizer, max_turns=0)
