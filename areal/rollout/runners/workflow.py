"""Episodes of a RolloutWorkflow: it calls the engine itself, and returns tensors or interactions to train on."""

import asyncio
import re
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from functools import partial
from itertools import pairwise
from typing import Any, TypeGuard, TypeVar

import numpy as np

from areal.api.engine_api import InferenceEngine
from areal.api.errors import AgentFailed, NoInteractions
from areal.api.io_struct import ModelRequest, ModelResponse, TokenChunk, add_digests
from areal.api.messages import Episode, Row
from areal.infra import tracing, workflow_context
from areal.infra.workflow_context import WorkflowContext
from areal.proxy import Interaction
from areal.rollout.episodes import Digests, bounded, call
from areal.rollout.loading import episode_function
from areal.rollout.traced_engine import TracedEngine
from areal.trajectory.tensors import UNLIMITED, RowLimits, check_row, rows_of
from areal.trajectory.tree import prompt_hash
from areal.utils.bounded_cache import BoundedCache
from areal.utils.callables import name_of
from areal.utils.seeds import CallSeeds
from areal.utils.waits import WAITS_FOR_MODEL, current

T = TypeVar("T")

REPEATED = re.compile(r"(<[^<>\s]+>|\[[^\[\]\s]+\])\1{3,}")
"""The same token without text, four times or more."""
MAX_REMEMBERED_PROMPTS = 64
"""Their texts; the samples of a group share one."""


class WorkflowRunner:
    def __init__(self, workflow: Any, engine: InferenceEngine, tokenizer: Any, limits: RowLimits = UNLIMITED) -> None:
        self.name = name_of(workflow)
        self._limits = limits
        self._run = episode_function(workflow)
        self._engine = engine
        self._prompts: BoundedCache[tuple[bool, bytes], str] = BoundedCache(MAX_REMEMBERED_PROMPTS)
        backend = getattr(tokenizer, "backend_tokenizer", None)  # its Python wrapper costs more than the work
        self._decode: Callable[[list[int]], str] = (
            tokenizer.decode if backend is None else partial(backend.decode, skip_special_tokens=False)
        )

    async def play(
        self, data: dict[str, Any], context: WorkflowContext, *, greedy: bool, seconds: float
    ) -> tuple[Episode | None, Digests]:
        trace = tracing.current()
        answers = self._engine if trace is None else TracedEngine(self._engine, trace)
        engine = RecordingEngine(answers, greedy, context.seed)
        with workflow_context.enter(context):
            result = await bounded(lambda: call(self._run, engine, data), seconds, self.name)
        if result is None:
            return None, engine.digests
        if not engine.versions:
            raise NoInteractions(f"{self.name} returned a trajectory, but the engine sampled no token for it")
        if type(result) is not Row and _is_interactions(result):
            episode = _episode_of(result)
        else:
            rows = self._rows(result, engine.temperature)
            messages = [message for row in rows for message in self._readable(row)]
            episode = Episode(rows, sum(row.reward for row in rows), messages)
            if not greedy:
                self._add_choices(rows, engine.answers)
        for row in episode.rows:
            self._settle_versions(row, engine.versions)
        episode.calls, episode.turns = len(engine.turns), engine.turns
        return episode, engine.digests

    def _rows(self, result: Any, temperature: float | None) -> list[Row]:
        if type(result) is not Row:
            return rows_of(result, self.name, temperature, self._limits)
        check_row(result, self.name, self._limits)
        return [result]

    def _settle_versions(self, row: Row, sampled: set[int]) -> None:
        """Hold a row to the versions that the engine reported, since they decide its staleness."""
        if row.recompute_logprobs:  # the short form says nothing of versions
            row.versions[row.loss_mask] = min(sampled)
            return
        foreign = sorted(set(row.versions[row.loss_mask].tolist()) - sampled)
        if foreign:
            raise AgentFailed(
                f"{self.name} returned a wrong trajectory: versions of trained tokens must be the engine's "
                f"output_versions, {sorted(sampled)}, got {foreign}; set loss_mask to 0 on tokens that it did not "
                "sample"
            )

    def _add_choices(self, rows: list[Row], answers: list[ModelResponse]) -> None:
        """Write down what the trained tokens were drawn from, if a call limited that: tensors say nothing of it.

        A token is that of the call whose prompt comes before it. Raises AgentFailed for one that is of no call.
        """
        if all(answer.choices is None for answer in answers):
            return
        for row in rows:
            unknown = row.loss_mask.copy()
            for answer in answers:
                found = _place_of(answer, row)
                if not unknown[found].any():
                    continue
                unknown[found] = False
                if answer.choices is not None:
                    row.choices.append(answer.choices.at(found.start, found.stop - found.start))
            if unknown.any():
                place = int(unknown.argmax())
                raise AgentFailed(
                    f"{self.name} returned a wrong trajectory: where calls limit what is drawn (top_p, top_k, "
                    "min_new_tokens, grammar or greedy), trained tokens must follow the prompt that they were drawn "
                    f"after, as in input_tokens and output_tokens, got token {place} that does not; set loss_mask to 0 "
                    "there, or ask without limits"
                )

    def _readable(self, row: Row) -> list[dict[str, Any]]:
        """A row as a person reads it: stretches of prompt and of sampled tokens."""
        mask, ids = row.loss_mask.tobytes(), row.input_ids.tolist()
        edges = [0]
        while (edge := mask.find(1 - mask[edges[-1]], edges[-1])) > 0:
            edges.append(edge)
        edges.append(len(ids))
        stretches: list[dict[str, Any]] = [
            {"role": "assistant", "content": self._text(row, ids[start:end])}
            if mask[start]
            else {"role": "prompt", "content": self._prompt_text(row, start, end)}
            for start, end in pairwise(edges)
        ]
        stretches[-1]["reward"] = row.reward
        return stretches

    def _prompt_text(self, row: Row, start: int, end: int) -> str:
        """The samples of a group have the same prompt."""
        ids = row.input_ids[start:end]
        key = bool(row.images), ids.tobytes()
        text = self._prompts.get(key)
        if text is None:
            text = self._text(row, ids.tolist())
            self._prompts.put(key, text)
        return text

    def _text(self, row: Row, ids: list[int]) -> str:
        """An image is hundreds of the same token: one of them and their number say as much."""
        text = self._decode(ids)
        return REPEATED.sub(lambda same: f"{same[1]}×{len(same[0]) // len(same[1])}", text) if row.images else text


def _place_of(answer: ModelResponse, row: Row) -> slice:
    """Where a row has an answer, or its beginning up to the row's end, after its prompt; empty if it has not."""
    begin, end = answer.input_len, min(answer.input_len + answer.output_len, len(row.input_ids))
    same = np.array_equal(row.input_ids[:end], [*answer.input_tokens, *answer.output_tokens][:end])
    versions = answer.output_versions[: end - begin]
    if begin >= end or not same or not (row.recompute_logprobs or np.array_equal(row.versions[begin:end], versions)):
        return slice(0)
    return slice(begin, end)


def _is_interactions(result: Any) -> TypeGuard[Mapping[str, Interaction]]:
    """Whether the workflow exported them from a direct client."""
    if not isinstance(result, Mapping) or not result:
        return False
    return all(isinstance(value, Interaction) for value in result.values())


def _episode_of(exported: Mapping[str, Interaction]) -> Episode:
    """Every row; the longest conversation, of equally long ones the latest, is the one a person reads.

    The tree is that of the client they were exported from; of several, whose indices are not each other's, none.
    """
    shown = max([*exported.values()][::-1], key=lambda each: len(each.messages))
    messages = [*shown.messages[:-1], {**shown.messages[-1], "reward": shown.reward}]
    trees = {id(each.nodes): each.nodes for each in exported.values()}
    nodes = shown.nodes if len(trees) == 1 else []
    given = sum(each.given for each in exported.values())
    return Episode([each.row for each in exported.values()], given, messages, nodes=nodes)


class RecordingEngine:
    """The engine as a workflow sees it; records every call and what its tokens were sampled with."""

    def __init__(self, engine: InferenceEngine, greedy: bool, seed: int | None) -> None:
        """`seed` decides what its calls draw; None = nothing does, or the seed that a call has."""
        self.turns: list[tuple[float, float, int]] = []
        """When each call was asked and answered (monotonic seconds), and the number of tokens it sampled."""
        self.versions: set[int] = set()
        self.digests: dict[int, str] = {}
        self.answers: list[ModelResponse] = []
        self._temperatures: set[float] = set()
        self._engine = engine
        self._session = secrets.token_hex(8)
        self._greedy = greedy
        self._seeds = None if seed is None else CallSeeds(seed)
        self._waits = current()

    @property
    def temperature(self) -> float | None:
        """What the sampler divided logits by; None if calls differ."""
        return next(iter(self._temperatures)) if len(self._temperatures) == 1 else None

    async def agenerate(self, req: ModelRequest) -> ModelResponse:
        req, asked_at = self._adjusted(req), time.monotonic()
        try:
            with self._waits.entered(WAITS_FOR_MODEL):
                response = await self._engine.agenerate(req)
        except (Exception, asyncio.CancelledError):
            self._give_seed_back(req)
            raise
        self._record(req, response, asked_at)
        return response

    async def astream(self, req: ModelRequest, *, every_seconds: float = 0.0) -> AsyncGenerator[TokenChunk, None]:
        req, asked_at = self._adjusted(req), time.monotonic()
        try:
            async with aclosing(self._engine.astream(req, every_seconds=every_seconds)) as chunks:
                while True:
                    with self._waits.entered(WAITS_FOR_MODEL):
                        chunk = await anext(chunks, None)
                    if chunk is None:
                        return
                    if chunk.response is not None:
                        self._record(req, chunk.response, asked_at)
                    yield chunk
        except (Exception, asyncio.CancelledError):
            self._give_seed_back(req)
            raise

    def _adjusted(self, req: ModelRequest) -> ModelRequest:
        """A copy, whose other fields were checked when the request was made and are not checked again."""
        adjusted, gconfig = _copy(req), _copy(req.gconfig)
        gconfig.greedy = gconfig.greedy or self._greedy
        if self._seeds is not None:
            gconfig.seed = self._seeds.next(prompt_hash(req.input_ids).digest(), req.gconfig.seed)
        adjusted.gconfig, adjusted.session = gconfig, req.session or self._session
        return adjusted

    def _give_seed_back(self, req: ModelRequest) -> None:
        """A call that fails leaves its seed to the call that is made in its place."""
        if self._seeds is not None:
            self._seeds.give_back(prompt_hash(req.input_ids).digest(), req.gconfig.seed)

    def _record(self, req: ModelRequest, response: ModelResponse, asked_at: float) -> None:
        self.turns.append((asked_at, time.monotonic(), response.output_len))
        self.versions.update(response.output_versions)
        self.answers.append(response)
        self._temperatures.add(req.gconfig.sampling_temperature)
        add_digests(self.digests, response.digests)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


def _copy(value: T) -> T:
    """`copy.copy` of a dataclass, for a tenth of its price."""
    copied = object.__new__(type(value))
    copied.__dict__.update(value.__dict__)
    return copied
