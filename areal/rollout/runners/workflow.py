"""Interactions that a RolloutWorkflow exported from a direct client, as an episode."""

# MERGED-DOC
# What a RolloutWorkflow returns, checked and turned into rows.
#
# Two shapes are known: the full tensor dict, batch first, and the short form of one completion (1-D prompt `input_ids`,
# `output_ids`, scalar `reward`), whose log-probs the trainer recomputes. Either may have `images`: encoded pictures in
# the order of their places, a list for each row, in the short form one list. Everything wrong is named at once.
# Episodes of a RolloutWorkflow: it calls the engine itself, and returns tensors or interactions to train on.

import re
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any, TypeGuard

import numpy as np

from areal.api.engine_api import InferenceEngine
from areal.api.errors import AgentFailed, NoInteractions
from areal.api.io_struct import ModelRequest, ModelResponse, TokenChunk
from areal.api.messages import Array, Episode, Row
from areal.infra import workflow_context
from areal.infra.workflow_context import WorkflowContext
from areal.proxy import Interaction
from areal.rollout.episodes import Digests, bounded, call
from areal.rollout.loading import episode_function
from areal.utils.callables import name_of


def is_interactions(result: Any) -> TypeGuard[Mapping[str, Interaction]]:
    if not isinstance(result, Mapping) or not result:
        return False
    return all(isinstance(value, Interaction) for value in result.values())


def episode_of(exported: Mapping[str, Interaction]) -> Episode:
    """Every row; the longest conversation, of equally long ones the latest, is the one a person reads."""
    told = max([*exported.values()][::-1], key=lambda each: len(each.messages))
    messages = [*told.messages[:-1], {**told.messages[-1], "reward": told.reward}]
    return Episode([each.row for each in exported.values()], sum(each.given for each in exported.values()), messages)


REQUIRED = ("input_ids", "loss_mask", "logprobs", "versions", "rewards")
OPTIONAL = ("attention_mask", "returns", "completion_index", "temperatures", "group_id", "truncated")
PER_ROW = ("rewards", "group_id", "truncated")
"""Fields of shape [batch]; the others have [batch, length]."""
SHORT = {"input_ids": 1, "output_ids": 1, "reward": 0}
"""Dimensions of the short form's fields."""


def rows_of(tensors: Any, name: str, temperature: float | None = 1.0) -> list[Row]:
    """Rows of a workflow's result; `AgentFailed` names every missing or wrong field.

    `temperature` is what its tokens were sampled at, where it does not say so itself; None = at several, so it must.
    """
    if not isinstance(tensors, Mapping):
        raise AgentFailed(f"{name} must return a dict of tensors or None, got {type(tensors).__name__}")
    is_short = "output_ids" in tensors
    required = tuple(SHORT) if is_short else REQUIRED
    faults = [f"{key} is missing" for key in required if key not in tensors]
    if temperature is None and "temperatures" not in tensors:
        faults.append("temperatures is missing, though its calls differ in temperature")
    numbers = {key: value for key, value in tensors.items() if key != "images"}
    arrays, unreadable = _read(numbers)
    faults += unreadable + (_short_faults(arrays) if is_short else _faults(arrays))
    images = tensors.get("images")
    if images is not None:
        faults += _image_faults([images]) if is_short else _row_faults(images, arrays) or _image_faults(images)
    if faults:
        raise AgentFailed(f"{name} returned a wrong trajectory: " + "; ".join(faults))
    sampled_at = 1.0 if temperature is None else temperature
    if is_short:
        rows = [_short_row(arrays, sampled_at)]
    else:
        rows = [_row(arrays, index, sampled_at) for index in range(len(arrays["rewards"]))]
    if images is not None:
        for row, shown in zip(rows, [images] if is_short else images, strict=True):
            row.images = list(shown)
    return rows


def _read(tensors: Mapping[str, Any]) -> tuple[dict[str, Array], list[str]]:
    """Every field that can be read as an array of numbers, and the faults of those that cannot."""
    arrays, faults = {}, []
    for key, value in tensors.items():
        try:
            arrays[key] = value.numpy(force=True) if hasattr(value, "detach") else np.asarray(value)
        except (TypeError, ValueError) as error:
            faults.append(f"{key} cannot be read as numbers: {error}")
            continue
        if arrays[key].dtype.kind not in "biuf":
            faults.append(f"{key} must be numbers, got {arrays.pop(key).dtype}")
    return arrays, faults


def _faults(arrays: dict[str, Array]) -> list[str]:
    faults = [f"{key} is unknown" for key in arrays if key not in (*REQUIRED, *OPTIONAL)]
    if "input_ids" not in arrays:
        return faults
    shape = arrays["input_ids"].shape
    if len(shape) != 2 or 0 in shape:
        return [*faults, f"input_ids must have shape [batch, length], got {list(shape)}"]
    for key, array in arrays.items():
        wanted = shape[:1] if key in PER_ROW else shape
        if array.shape != wanted:
            faults.append(f"{key} must have shape {list(wanted)}, got {list(array.shape)}")
        elif array.dtype.kind == "f" and not np.isfinite(array).all():
            faults.append(f"{key} must be finite")
    return faults + _meaning_faults(arrays)


def _meaning_faults(arrays: dict[str, Array]) -> list[str]:
    faults = []
    if arrays["input_ids"].dtype.kind not in "iu":
        faults.append(f"input_ids must be integers, got {arrays['input_ids'].dtype}")
    shape = arrays["input_ids"].shape
    mask, attention = arrays.get("loss_mask"), arrays.get("attention_mask")
    if mask is not None and mask.shape == shape:
        if mask[:, 0].any():
            faults.append("loss_mask must be 0 on the first token, which nothing predicts")
        if not mask.any(axis=1).all():
            faults.append("loss_mask must have a token to train on in every row")
    if attention is not None and attention.shape == shape and not attention.all():
        if (np.diff(attention.astype(np.bool_).astype(np.int8), axis=1) > 0).any():
            faults.append("attention_mask must be 1 on tokens and then 0: padding belongs on the right")
        if mask is not None and mask.shape == shape and (mask.astype(np.bool_) & (attention == 0)).any():
            faults.append("loss_mask must be 0 where attention_mask is")
    return faults


def _row_faults(images: Any, arrays: dict[str, Array]) -> list[str]:
    if not isinstance(images, list | tuple):
        return [f"images must be a list with a list of encoded bytes for each row, got {type(images).__name__}"]
    ids = arrays.get("input_ids")
    if ids is None or ids.ndim != 2 or len(images) == len(ids):
        return []
    return [f"images must have a list for each of the {len(ids)} rows, got {len(images)}"]


def _image_faults(images: Sequence[Any]) -> list[str]:
    """Of pictures by row."""
    strangers = {type(shown).__name__ for shown in images if not isinstance(shown, list | tuple)}
    if strangers:
        return [f"images must hold a list for each row, got {', '.join(sorted(strangers))}"]
    strangers = {type(image).__name__ for shown in images for image in shown if not isinstance(image, bytes)}
    if strangers:
        names = ", ".join(sorted(strangers))
        return [f"images must hold encoded bytes, got {names}; use areal.utils.images.encode_image"]
    return []


def _row(arrays: dict[str, Array], index: int, temperature: float) -> Row:
    attention = arrays.get("attention_mask")
    length = arrays["input_ids"].shape[1] if attention is None else np.count_nonzero(attention[index])

    def take(key: str, dtype: type[np.generic]) -> Array:
        return np.ascontiguousarray(arrays[key][index, :length], dtype=dtype)

    mask = take("loss_mask", np.bool_)
    reward = float(arrays["rewards"][index])
    return Row(
        input_ids=take("input_ids", np.int32),
        loss_mask=mask,
        logprobs=take("logprobs", np.float32),
        versions=take("versions", np.int32),
        returns=take("returns", np.float32) if "returns" in arrays else np.where(mask, reward, 0.0).astype(np.float32),
        completion_index=take("completion_index", np.int32)
        if "completion_index" in arrays
        else np.where(mask, index, -1).astype(np.int32),
        temperatures=take("temperatures", np.float32) if "temperatures" in arrays else _temperatures(mask, temperature),
        reward=reward,
        truncated=bool(arrays["truncated"][index]) if "truncated" in arrays else False,
    )


def _temperatures(mask: Array, temperature: float) -> Array:
    return np.where(mask, temperature, 1.0).astype(np.float32)


def _short_faults(arrays: dict[str, Array]) -> list[str]:
    faults = [f"{key} is unknown beside output_ids" for key in arrays if key not in SHORT]
    for key, dims in SHORT.items():
        if key not in arrays:
            continue
        array = arrays[key]
        if array.ndim != dims:
            faults.append(f"{key} must have {dims} dimension{'s' * (dims != 1)}, got shape {list(array.shape)}")
        elif not array.size:
            faults.append(f"{key} must hold a token")
        elif dims and array.dtype.kind not in "iu":
            faults.append(f"{key} must be integers, got {array.dtype}")
        elif not np.isfinite(array).all():
            faults.append(f"{key} must be finite, got {array}")
    return faults


def _short_row(arrays: dict[str, Array], temperature: float) -> Row:
    prompt, output = arrays["input_ids"], arrays["output_ids"]
    mask = np.r_[np.zeros(len(prompt), np.bool_), np.ones(len(output), np.bool_)]
    reward = float(arrays["reward"])
    return Row(
        input_ids=np.concatenate((prompt, output)).astype(np.int32),
        loss_mask=mask,
        logprobs=np.zeros(len(mask), np.float32),
        versions=np.full(len(mask), -1, np.int32),
        returns=np.where(mask, reward, 0.0).astype(np.float32),
        completion_index=np.where(mask, 0, -1).astype(np.int32),
        temperatures=_temperatures(mask, temperature),
        reward=reward,
        recompute_logprobs=True,
    )


REPEATED = re.compile(r"(<[^<>\s]+>|\[[^\[\]\s]+\])\1{3,}")
"""The same token of no text, four times and more."""


class WorkflowRunner:
    def __init__(self, workflow: Any, engine: InferenceEngine, tokenizer: Any) -> None:
        self.name = name_of(workflow)
        self._run = episode_function(workflow)
        self._engine = engine
        core = getattr(tokenizer, "backend_tokenizer", None)  # its Python wrapper costs more than the work
        self._decode: Callable[[list[int]], str] = (
            tokenizer.decode if core is None else partial(core.decode, skip_special_tokens=False)
        )

    async def play(
        self, data: dict[str, Any], context: WorkflowContext, *, greedy: bool, seconds: float
    ) -> tuple[Episode | None, Digests]:
        witness = WitnessedEngine(self._engine, greedy)
        with workflow_context.enter(context):
            result = await bounded(lambda: call(self._run, witness, data), seconds, self.name)
        if result is None:
            return None, witness.digests
        if not witness.versions:
            raise NoInteractions(f"{self.name} returned a trajectory, but the engine sampled no token for it")
        if is_interactions(result):
            episode = episode_of(result)
        else:
            rows = rows_of(result, self.name, witness.temperature)
            messages = [message for row in rows for message in self._readable(row)]
            episode = Episode(rows, sum(row.reward for row in rows), messages)
        for row in episode.rows:
            self._settle_versions(row, witness.versions)
        episode.calls, episode.turns = len(witness.turns), witness.turns
        return episode, witness.digests

    def _settle_versions(self, row: Row, witnessed: set[int]) -> None:
        """A row's age is what the engine said, since staleness is decided by it."""
        if row.recompute_logprobs:  # the short form says nothing of versions
            row.versions[row.loss_mask] = min(witnessed)
            return
        foreign = sorted(set(row.versions[row.loss_mask].tolist()) - witnessed)
        if foreign:
            raise AgentFailed(
                f"{self.name} returned a wrong trajectory: versions of trained tokens must be the engine's "
                f"output_versions, {sorted(witnessed)}, got {foreign}; set loss_mask to 0 on tokens that it did not "
                "sample"
            )

    def _readable(self, row: Row) -> list[dict[str, Any]]:
        """A row as a person reads it: stretches of prompt and of sampled tokens."""
        mask, ids = row.loss_mask, row.input_ids.tolist()
        edges = [0, *(np.flatnonzero(mask[1:] != mask[:-1]) + 1).tolist(), len(ids)]
        stretches: list[dict[str, Any]] = [
            {"role": "assistant" if mask[start] else "prompt", "content": self._text(row, ids[start:end])}
            for start, end in pairwise(edges)
        ]
        stretches[-1]["reward"] = row.reward
        return stretches

    def _text(self, row: Row, ids: list[int]) -> str:
        """A picture is hundreds of the same token: one of them and their number say as much."""
        text = self._decode(ids)
        return REPEATED.sub(lambda same: f"{same[1]}×{len(same[0]) // len(same[1])}", text) if row.images else text


class WitnessedEngine:
    """The engine as a workflow sees it: every call is counted, and what produced its tokens is noted."""

    def __init__(self, engine: InferenceEngine, greedy: bool) -> None:
        self._engine = engine
        self._greedy = greedy
        self.turns: list[tuple[float, float, int]] = []
        """When each call asked and was answered (monotonic seconds), and the tokens it sampled."""
        self.versions: set[int] = set()
        self.temperatures: set[float] = set()
        self.digests: dict[int, str] = {}

    @property
    def temperature(self) -> float | None:
        """What the sampler divided logits by; None if calls differ."""
        return next(iter(self.temperatures)) if len(self.temperatures) == 1 else None

    async def agenerate(self, req: ModelRequest) -> ModelResponse:
        req, asked_at = self._asked(req), time.monotonic()
        return self._note(req, await self._engine.agenerate(req), asked_at)

    async def astream(self, req: ModelRequest) -> AsyncGenerator[TokenChunk, None]:
        req, asked_at = self._asked(req), time.monotonic()
        async with aclosing(self._engine.astream(req)) as chunks:
            async for chunk in chunks:
                if chunk.response is not None:
                    self._note(req, chunk.response, asked_at)
                yield chunk

    def _asked(self, req: ModelRequest) -> ModelRequest:
        return replace(req, gconfig=req.gconfig.new(greedy=True)) if self._greedy else req

    def _note(self, req: ModelRequest, response: ModelResponse, asked_at: float) -> ModelResponse:
        self.turns.append((asked_at, time.monotonic(), response.output_len))
        self.versions.update(response.output_versions)
        # A greedy choice is made on undivided logits.
        self.temperatures.add(1.0 if req.gconfig.greedy else req.gconfig.temperature or 1.0)
        self.digests |= response.digests
        return response

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)
