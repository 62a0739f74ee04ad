"""The sequences that an agent wants trained, read from what it returned: its SequenceSamples, or None.

Owns what a SequenceSample may hold. Whether its tokens were sampled is for `trajectories` to find out.
"""

# MERGED-DOC
# Sequences that are to be trained, found again in the record of what the engine sampled.
#
# A token is trained only where the record has it: same prompt before it, same token, and the log-prob and version with
# which it was sampled. Anything else is refused by name, and so is a generation that would be trained twice.

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np

from areal.api.errors import AgentFailed, RewardInvalid
from areal.api.messages import Array, Row
from areal.proxy import Interaction
from realhf.api.core.agent_api import SequenceSample
from realhf.episode.generations import SampledGeneration

PER_TOKEN = {"packed_input_ids": 0, "prompt_mask": 0, "loss_mask": 0, "packed_logprobs": -1}
"""Keys with an entry per token, and how many more a sequence has of them than it has tokens."""
PER_SEQUENCE = ("rewards", "returns", "seq_no_eos_mask", "version_start", "version_end")
CARRIED = ("packed_prompts", "birth_time", "task_ids")
"""Keys that may be there and are not looked at."""


@dataclass(frozen=True)
class TrainedSequence:
    ids: Array
    """int32"""
    trained: Array
    """bool: tokens that the loss is taken on."""
    reward: float
    """What is reported."""
    total: float
    """The return that its trained tokens learn from."""
    claims: Mapping[str, Any]
    """What its author says of log-probs, versions and the end, to be compared with the record."""


def read_sample(sample: Any, name: str) -> list[TrainedSequence]:
    """The sequences of one SequenceSample; `AgentFailed` names everything that is wrong with it."""
    if not isinstance(sample, SequenceSample):
        raise AgentFailed(f"{name} must return a list of SequenceSample or None, got {type(sample).__name__} in it")
    arrays, faults = _read(sample.data)
    lengths = _lengths(sample, arrays)
    faults += _missing(arrays, sample.data) + _misfits(arrays, lengths)
    if faults:
        raise AgentFailed(f"{name} returned a wrong SequenceSample: " + "; ".join(faults))
    parts = {key: _split(array, key, lengths) for key, array in arrays.items()}
    returns = arrays.get("returns", arrays["rewards"])
    if not (np.isfinite(arrays["rewards"]).all() and np.isfinite(returns).all()):
        raise RewardInvalid(f"rewards and returns must be finite, {name} returned {arrays['rewards']} and {returns}")
    masks = parts["loss_mask"] if "loss_mask" in parts else [part == 0 for part in parts["prompt_mask"]]
    return [
        TrainedSequence(
            ids=parts["packed_input_ids"][number].astype(np.int32),
            trained=masks[number].astype(np.bool_),
            reward=float(arrays["rewards"][number]),
            total=float(returns[number]),
            claims={key: part[number] for key, part in parts.items()},
        )
        for number in range(len(lengths))
    ]


def whole_record(
    record: Sequence[SampledGeneration],
    last: Sequence[SampledGeneration],
    rewards: Sequence[float],
    turn_discount: float,
) -> list[TrainedSequence]:
    """Every generation; those in `last` have the rewards, the others the discounted mean of what continues them."""
    given = {generation.index: reward for generation, reward in zip(last, rewards, strict=True)}
    totals: dict[int, float] = {}
    paid: dict[int, list[float]] = {}
    for generation in reversed(record):  # one that continues another finished after it
        later = paid.get(generation.index, [])
        share = turn_discount * sum(later) / len(later) if later else 0.0
        totals[generation.index] = given.get(generation.index, 0.0) + share
        parent = _parent(generation, record)
        if parent is not None:
            paid.setdefault(parent, []).append(totals[generation.index])
    return [
        TrainedSequence(
            ids=each.ids,
            trained=np.arange(len(each.ids)) >= each.start,
            reward=given.get(each.index, 0.0),
            total=totals[each.index],
            claims={},
        )
        for each in record
    ]


def _parent(generation: SampledGeneration, record: Sequence[SampledGeneration]) -> int | None:
    """The longest generation that this one's prompt continues, of equal ones the first."""
    prompt = generation.ids[: generation.start]
    earlier = [each for each in record[: generation.index] if each.lies_on(prompt)]
    return max(earlier, key=lambda each: len(each.ids)).index if earlier else None


def _read(data: Mapping[str, Any]) -> tuple[dict[str, Array], list[str]]:
    """Every known key as a 1-D array of numbers, and the faults of those that are none."""
    arrays, faults = {}, []
    for key, value in data.items():
        if key in CARRIED:
            continue
        if key not in PER_TOKEN and key not in PER_SEQUENCE:
            faults.append(f"{key} is unknown")
            continue
        try:
            array = np.asarray(value.detach().cpu() if hasattr(value, "detach") else value)
        except (TypeError, ValueError) as error:
            faults.append(f"{key} cannot be read as numbers: {error}")
            continue
        if array.ndim != 1 or array.dtype.kind not in ("iu" if key == "packed_input_ids" else "biuf"):
            faults.append(f"{key} must be 1-D and of numbers, got {array.dtype} of shape {list(array.shape)}")
        else:
            arrays[key] = array
    return arrays, faults


def _missing(arrays: Mapping[str, Array], data: Mapping[str, Any]) -> list[str]:
    faults = [f"{key} is missing" for key in ("packed_input_ids", "rewards") if key not in data]
    masks = [key for key in ("prompt_mask", "loss_mask") if key in data]
    if not masks:
        faults.append("prompt_mask (1 on tokens that are not trained) or loss_mask (1 on those that are) is missing")
    return faults + (["prompt_mask and loss_mask say the same twice; leave one out"] if len(masks) == 2 else [])


def _lengths(sample: SequenceSample, arrays: Mapping[str, Array]) -> list[int]:
    """Tokens of each sequence; without `seqlens` there is one."""
    if "packed_input_ids" in sample.seqlens:
        return [int(length) for length in chain.from_iterable(sample.seqlens["packed_input_ids"])]
    return [len(arrays["packed_input_ids"])] if "packed_input_ids" in arrays else []


def _misfits(arrays: Mapping[str, Array], lengths: list[int]) -> list[str]:
    faults = []
    for key, array in arrays.items():
        wanted = sum(lengths) + PER_TOKEN[key] * len(lengths) if key in PER_TOKEN else len(lengths)
        if len(array) != wanted:
            faults.append(f"{key} must have {wanted} entries for sequences of {lengths} tokens, got {len(array)}")
    return faults


def _split(array: Array, key: str, lengths: list[int]) -> list[Array]:
    sizes = [length + PER_TOKEN[key] for length in lengths] if key in PER_TOKEN else [1] * len(lengths)
    return np.split(array, np.cumsum(sizes)[:-1])


LOGPROB_TOLERANCE = 1e-3
"""An agent may have kept log-probs in a shorter float; they are compared, not used."""


class Trajectories:
    """Rows of one episode. `name` is the agent's, for errors."""

    def __init__(self, record: Sequence[SampledGeneration], tokenizer: Any, name: str) -> None:
        self._record = record
        self._tokenizer = tokenizer
        self._name = name
        self._trained: set[int] = set()

    def add(self, sequence: TrainedSequence) -> Interaction:
        """The row of a sequence, made of the generations that its trained tokens belong to."""
        lying = [each for each in self._record if each.lies_on(sequence.ids)]
        chosen = self._chosen(sequence, lying)
        row = _row(sequence, chosen)
        self._check_claims(sequence, chosen, row)
        self._trained |= {each.index for each in chosen}
        return Interaction(
            id=uuid.uuid4().hex,
            messages=self._readable(sequence.ids, lying),
            reward=sequence.reward,
            given=sequence.reward,
            row=row,
        )

    def _chosen(self, sequence: TrainedSequence, lying: Sequence[SampledGeneration]) -> list[SampledGeneration]:
        """Generations, in order, that cover the trained tokens; of two that could, one not trained yet."""
        open_ = sequence.trained.copy()
        chosen = []
        for each in sorted(lying, key=lambda each: (each.start, -len(each.ids))):
            if each.index not in self._trained and open_[each.answer].any():
                chosen.append(each)
                open_[each.answer] = False
        if open_.any():
            self._refuse(sequence, lying, int(np.flatnonzero(open_)[0]))
        if not chosen:
            raise AgentFailed(f"{self._name} returned a sequence without a token to train on; leave it out")
        return chosen

    def _refuse(self, sequence: TrainedSequence, lying: Sequence[SampledGeneration], place: int) -> None:
        which = f"token {place} of a sequence of {len(sequence.ids)} (id {sequence.ids[place]})"
        if any(each.start <= place < len(each.ids) for each in lying):
            raise AgentFailed(
                f"{self._name} returned {which} to be trained a second time; mask it as prompt in all but one sequence"
            )
        raise AgentFailed(
            f"{self._name} returned {which} to be trained, but the engine did not sample it behind the tokens before "
            "it; build sequences from act.seqs and the ids you put on obs_queue, and mask everything else as prompt"
        )

    def _check_claims(self, sequence: TrainedSequence, chosen: Sequence[SampledGeneration], row: Row) -> None:
        """What an agent says of its tokens must be what the engine said, though the engine's own is used."""
        said = sequence.claims
        truth: dict[str, Array] = {
            "packed_logprobs": row.logprobs[1:],
            "seq_no_eos_mask": np.array([chosen[-1].truncated]),
            "version_start": chosen[0].versions[:1],
            "version_end": chosen[-1].versions[-1:],
        }
        for key, true in truth.items():
            if key not in said:
                continue
            compared = row.loss_mask[1:] if key == "packed_logprobs" else np.ones(1, np.bool_)
            wrong = np.flatnonzero(compared & ~np.isclose(said[key], true, rtol=0, atol=LOGPROB_TOLERANCE))
            if len(wrong):
                place = wrong[0]
                raise AgentFailed(
                    f"{self._name} returned {key}[{place}] = {said[key][place]} where the engine said {true[place]}; "
                    "pass on what BundledGenerationOutputs has, or leave the key out"
                )

    def _readable(self, ids: Array, lying: Sequence[SampledGeneration]) -> list[dict[str, Any]]:
        """A sequence as a person reads it: stretches of prompt and of sampled tokens."""
        sampled = np.zeros(len(ids), np.bool_)
        for each in lying:
            sampled[each.answer] = True
        edges = np.flatnonzero(np.diff(sampled)) + 1
        return [
            {"role": "assistant" if sampled[part[0]] else "prompt", "content": self._tokenizer.decode(ids[part])}
            for part in np.split(np.arange(len(ids)), edges)
        ]


def _row(sequence: TrainedSequence, chosen: Sequence[SampledGeneration]) -> Row:
    length = len(sequence.ids)
    row = Row(
        input_ids=sequence.ids,
        loss_mask=sequence.trained,
        logprobs=np.zeros(length, np.float32),
        versions=np.full(length, -1, np.int32),
        returns=np.where(sequence.trained, sequence.total, 0.0).astype(np.float32),
        completion_index=np.full(length, -1, np.int32),
        temperatures=np.ones(length, np.float32),
        reward=sequence.reward,
        truncated=chosen[-1].truncated,
    )
    for each in chosen:
        sampled = np.flatnonzero(sequence.trained[each.answer])
        places = each.start + sampled
        row.logprobs[places] = each.logprobs[sampled]
        row.versions[places] = each.versions[sampled]
        row.completion_index[places] = each.index
        row.temperatures[places] = each.temperature
    return row
