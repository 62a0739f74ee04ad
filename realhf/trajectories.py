"""From what an agent returned to training rows: its sequences, found again in the record of what the engine sampled.

Owns which keys a SequenceSample may have. A token is trained only where the record has it: the same prompt before it,
the same token, with the log-prob and version that it was sampled with. Anything else is refused by name, and so is a
generation that would be trained twice.
"""

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np

from areal.api.errors import AgentFailed, RewardInvalid
from areal.api.messages import Array, Row
from areal.api.reward_api import LARGEST_REWARD
from areal.proxy import Interaction
from areal.trajectory.rewards import discounted_returns
from realhf.api.core.agent_api import SequenceSample

PER_TOKEN = {"packed_input_ids": 0, "prompt_mask": 0, "loss_mask": 0, "packed_logprobs": -1}
"""Keys with an entry per token: entries per sequence minus its tokens (log-probs: -1)."""
PER_SEQUENCE = ("rewards", "returns", "seq_no_eos_mask", "version_start", "version_end")
IGNORED = ("packed_prompts", "birth_time", "task_ids")
"""Keys that may be there and are not read."""
LOGPROB_TOLERANCE = 1e-3
"""An agent may have kept log-probs in a shorter float; they are compared, not used."""


@dataclass(frozen=True)
class SampledGeneration:
    """One answer as the engine gave it."""

    index: int
    """Place in the episode, in order of finishing."""
    ids: Array
    """int32: prompt and answer."""
    start: int
    """Where the answer begins."""
    logprobs: Array
    """float32, of the answer's tokens."""
    versions: Array
    """int32, of the answer's tokens."""
    temperature: float
    truncated: bool

    @property
    def answer(self) -> slice:
        return slice(self.start, len(self.ids))

    def is_prefix_of(self, ids: Array) -> bool:
        """Whether a sequence begins with this prompt and this answer."""
        return np.array_equal(ids[: len(self.ids)], self.ids)


@dataclass(frozen=True)
class TrainedSequence:
    """A sequence that is to be trained."""

    ids: Array
    """int32"""
    trained: Array
    """bool: tokens that the loss is taken on."""
    reward: float
    """What is reported."""
    return_value: float
    """What its trained tokens learn from."""
    claims: Mapping[str, Any]
    """What the agent says of log-probs, versions and the end, to be compared with the record."""


def sequences_of_sample(sample: Any, name: str) -> list[TrainedSequence]:
    """The sequences of one SequenceSample; `AgentFailed` names everything that is wrong with it."""
    if not isinstance(sample, SequenceSample):
        raise AgentFailed(f"{name} must return a list of SequenceSample or None, got {type(sample).__name__} in it")
    arrays, faults = _read(sample.data)
    lengths = _lengths(sample, arrays)
    faults += _missing(sample.data) + _wrong_lengths(arrays, lengths)
    if faults:
        raise AgentFailed(f"{name} returned a wrong SequenceSample: " + "; ".join(faults))
    parts = {key: _split(array, key, lengths) for key, array in arrays.items()}
    returns = arrays.get("returns", arrays["rewards"])
    for given in (arrays["rewards"], returns):
        if not (np.abs(given) <= LARGEST_REWARD).all():  # so NaN is refused too
            raise RewardInvalid(
                f"rewards and returns must be finite in float32 (at most {LARGEST_REWARD:.3g} in size), got {given} "
                f"from {name}; scale them down"
            )
    masks = parts["loss_mask"] if "loss_mask" in parts else [part == 0 for part in parts["prompt_mask"]]
    return [
        TrainedSequence(
            ids=parts["packed_input_ids"][number].astype(np.int32),
            trained=masks[number].astype(np.bool_),
            reward=float(arrays["rewards"][number]),
            return_value=float(returns[number]),
            claims={key: part[number] for key, part in parts.items()},
        )
        for number in range(len(lengths))
    ]


def sequences_of_record(
    record: Sequence[SampledGeneration],
    last: Sequence[SampledGeneration],
    rewards: Sequence[float],
    turn_discount: float,
) -> list[TrainedSequence]:
    """Every generation; those in `last` get the rewards, the others the discounted mean of what continues them."""
    given = [0.0] * len(record)
    for generation, reward in zip(last, rewards, strict=True):
        given[generation.index] = reward
    returns = discounted_returns(given, [_parent(each, record) for each in record], turn_discount)
    return [
        TrainedSequence(
            ids=each.ids,
            trained=np.arange(len(each.ids)) >= each.start,
            reward=given[each.index],
            return_value=returns[each.index],
            claims={},
        )
        for each in record
    ]


class Trajectories:
    """The rows of one episode. `name` is the agent's, for errors."""

    def __init__(self, record: Sequence[SampledGeneration], tokenizer: Any, name: str) -> None:
        self._record = record
        self._tokenizer = tokenizer
        self._name = name
        self._trained: set[int] = set()

    def add(self, sequence: TrainedSequence) -> Interaction:
        """The row of a sequence, made of the generations that its trained tokens belong to."""
        contained = [each for each in self._record if each.is_prefix_of(sequence.ids)]
        chosen = self._choose(sequence, contained)
        row = _row(sequence, chosen)
        self._check_claims(sequence, chosen, row)
        self._trained |= {each.index for each in chosen}
        return Interaction(
            id=uuid.uuid4().hex,
            messages=self._readable(sequence.ids, contained),
            reward=sequence.reward,
            given=sequence.reward,
            row=row,
        )

    def _choose(self, sequence: TrainedSequence, contained: Sequence[SampledGeneration]) -> list[SampledGeneration]:
        """Generations, in order, that cover the trained tokens; of two that could, one not trained yet."""
        uncovered = sequence.trained.copy()
        chosen = []
        for each in sorted(contained, key=lambda each: (each.start, -len(each.ids))):
            if each.index not in self._trained and uncovered[each.answer].any():
                chosen.append(each)
                uncovered[each.answer] = False
        if uncovered.any():
            raise self._not_in_record(sequence, contained, int(np.flatnonzero(uncovered)[0]))
        if not chosen:
            raise AgentFailed(f"{self._name} returned a sequence without a token to train on; leave it out")
        return chosen

    def _not_in_record(
        self, sequence: TrainedSequence, contained: Sequence[SampledGeneration], place: int
    ) -> AgentFailed:
        which = f"token {place} of a sequence of {len(sequence.ids)} (id {sequence.ids[place]})"
        if any(each.start <= place < len(each.ids) for each in contained):
            return AgentFailed(
                f"{self._name} returned {which} to be trained a second time; mask it as prompt in all but one sequence"
            )
        return AgentFailed(
            f"{self._name} returned {which} to be trained, but the engine did not sample it after the tokens before "
            "it; build sequences from act.seqs and the ids you put on obs_queue, and mask everything else as prompt"
        )

    def _check_claims(self, sequence: TrainedSequence, chosen: Sequence[SampledGeneration], row: Row) -> None:
        """What an agent says of its tokens must match the record, though the record is what is used."""
        claims = sequence.claims
        recorded: dict[str, Array] = {
            "packed_logprobs": row.logprobs[1:],
            "seq_no_eos_mask": np.array([chosen[-1].truncated]),
            "version_start": chosen[0].versions[:1],
            "version_end": chosen[-1].versions[-1:],
        }
        for key, values in recorded.items():
            if key not in claims:
                continue
            compared = row.loss_mask[1:] if key == "packed_logprobs" else np.ones(1, np.bool_)
            wrong = np.flatnonzero(compared & ~np.isclose(claims[key], values, rtol=0, atol=LOGPROB_TOLERANCE))
            if len(wrong):
                place = wrong[0]
                raise AgentFailed(
                    f"{self._name} returned {key}[{place}] = {claims[key][place]} where the engine said "
                    f"{values[place]}; pass on what BundledGenerationOutputs has, or leave the key out"
                )

    def _readable(self, ids: Array, contained: Sequence[SampledGeneration]) -> list[dict[str, Any]]:
        """A sequence as a person reads it: stretches of prompt and of sampled tokens."""
        sampled = np.zeros(len(ids), np.bool_)
        for each in contained:
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
        returns=np.where(sequence.trained, sequence.return_value, 0.0).astype(np.float32),
        completion_index=np.full(length, -1, np.int32),
        temperatures=np.ones(length, np.float32),
        reward=sequence.reward,
        truncated=chosen[-1].truncated,
        truncated_completions=[each.index for each in chosen[:-1] if each.truncated],
    )
    for each in chosen:
        sampled = np.flatnonzero(sequence.trained[each.answer])
        places = each.start + sampled
        row.logprobs[places] = each.logprobs[sampled]
        row.versions[places] = each.versions[sampled]
        row.completion_index[places] = each.index
        row.temperatures[places] = each.temperature
    return row


def _parent(generation: SampledGeneration, record: Sequence[SampledGeneration]) -> int | None:
    """The longest generation that this one's prompt continues, of equal ones the first."""
    prompt = generation.ids[: generation.start]
    earlier = [each for each in record[: generation.index] if each.is_prefix_of(prompt)]
    return max(earlier, key=lambda each: len(each.ids)).index if earlier else None


def _read(data: Mapping[str, Any]) -> tuple[dict[str, Array], list[str]]:
    """Every known key as a 1-D array of numbers, and what is wrong with the other keys."""
    arrays, faults = {}, []
    for key, value in data.items():
        if key in IGNORED:
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


def _missing(data: Mapping[str, Any]) -> list[str]:
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


def _wrong_lengths(arrays: Mapping[str, Array], lengths: list[int]) -> list[str]:
    faults = []
    for key, array in arrays.items():
        wanted = sum(lengths) + PER_TOKEN[key] * len(lengths) if key in PER_TOKEN else len(lengths)
        if len(array) != wanted:
            faults.append(f"{key} must have {wanted} entries for sequences of {lengths} tokens, got {len(array)}")
    return faults


def _split(array: Array, key: str, lengths: list[int]) -> list[Array]:
    sizes = [length + PER_TOKEN[key] for length in lengths] if key in PER_TOKEN else [1] * len(lengths)
    return np.split(array, np.cumsum(sizes)[:-1])
