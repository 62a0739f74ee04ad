"""The sequences that an agent wants trained, read from what it returned: its SequenceSamples, or None.

Owns what a SequenceSample may hold. Whether its tokens were sampled is for `trajectories` to find out.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np

from areal.api.errors import AgentFailed, RewardInvalid
from areal.api.messages import Array
from realhf.api.core.data_api import SequenceSample
from realhf.episode.generations import Generation

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
    record: Sequence[Generation], last: Sequence[Generation], rewards: Sequence[float], turn_discount: float
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


def _parent(generation: Generation, record: Sequence[Generation]) -> int | None:
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
