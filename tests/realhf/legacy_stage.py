"""An engine that says what a test wants, and one episode of an older agent with it, as the executor runs it."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from areal.api.messages import Episode, Rejection, Row
from areal.config.rollout import GenerationHyperparameters
from areal.engine.builtin.tokenizer import make_tokenizer
from areal.engine.inference.fake import FakeEngine
from areal.infra.workflow_context import WorkflowContext
from areal.rollout.episodes import run_episode
from areal.rollout.loading import Fillers, WorkflowSpec, load
from areal.rollout.runners.workflow import WorkflowRunner
from realhf.api.core.agent_api import EnvironmentService
from realhf.episode import LegacyWorkflow

MAX_POSITIONS = 512
TASK: dict[str, Any] = {"messages": [{"role": "user", "content": "Sort 5291"}], "answer": "1259"}
TOKENIZER = make_tokenizer(["Sort 5291 into 1259, that is wrong, try again"] * 4, 300, MAX_POSITIONS)


class FiveValues(EnvironmentService):
    """Rewards 1259; returns five values, as our own environment does."""

    async def step(self, action):
        _, answers = action
        return None, [float(answer == "1259") for answer in answers], True, False, {}


class TwoValues(EnvironmentService):
    async def step(self, action):
        _, answers = action
        success = [answer == "1259" for answer in answers]
        return success, [float(each) for each in success]


def saying(*answers: str, cut_off: bool = False) -> FakeEngine:
    """An engine that gives these answers in turn, and then the last one forever."""
    left = list(answers)

    def script(ids: Sequence[int]) -> Sequence[int]:
        text = left.pop(0) if len(left) > 1 else left[0]
        return TOKENIZER.encode(text) + ([] if cut_off else [TOKENIZER.eos_token_id])

    return FakeEngine(vocab_size=len(TOKENIZER), max_positions=MAX_POSITIONS, script=script, tokenizer=TOKENIZER)


async def play(
    agent: type,
    engine: FakeEngine,
    env: type = FiveValues,
    *,
    task: dict[str, Any] = TASK,
    seconds: float = 30,
    max_new_tokens: int = 32,
    turn_discount: float = 0.9,
    **agent_args: Any,
) -> Episode | Rejection:
    """Agent and environment travel as they do to a worker."""
    arguments = {"agent": agent, "agent_args": agent_args, "env": env, "env_args": {}, "turn_discount": turn_discount}
    spec = WorkflowSpec.unpack(WorkflowSpec(LegacyWorkflow, arguments).pack())
    workflow = load(spec, Fillers(GenerationHyperparameters(max_new_tokens=max_new_tokens), TOKENIZER))
    runner = WorkflowRunner(workflow, engine, TOKENIZER)
    outcome, _ = await run_episode(
        runner, json.loads(json.dumps(task)), WorkflowContext(), greedy=False, seconds=seconds
    )
    return outcome


def accepted(outcome: Episode | Rejection) -> Episode:
    assert isinstance(outcome, Episode), outcome
    return outcome


def trained_texts(rows: Sequence[Row]) -> Iterator[str]:
    for row in rows:
        yield TOKENIZER.decode(row.input_ids[row.loss_mask])


def returns_of(rows: Sequence[Row]) -> list[float]:
    """The return of each row's trained tokens, which all have the same."""
    found = [np.unique(row.returns[row.loss_mask]) for row in rows]
    assert all(len(each) == 1 for each in found)
    return [round(float(each[0]), 5) for each in found]
