"""Sequences that are to be trained, found again in the record of what the engine sampled.

A token is trained only where the record has it: same prompt before it, same token, and the log-prob and version with
which it was sampled. Anything else is refused by name, and so is a generation that would be trained twice.
"""

import uuid
from collections.abc import Sequence
from typing import Any

import numpy as np

from areal.api.errors import AgentFailed
from areal.api.messages import Array, Row
from areal.proxy import Interaction
from realhf.episode.generations import Generation
from realhf.episode.sequences import TrainedSequence

LOGPROB_TOLERANCE = 1e-3
"""An agent may have kept log-probs in a shorter float; they are compared, not used."""


class Trajectories:
    """Rows of one episode. `name` is the agent's, for errors."""

    def __init__(self, record: Sequence[Generation], tokenizer: Any, name: str) -> None:
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

    def _chosen(self, sequence: TrainedSequence, lying: Sequence[Generation]) -> list[Generation]:
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

    def _refuse(self, sequence: TrainedSequence, lying: Sequence[Generation], place: int) -> None:
        which = f"token {place} of a sequence of {len(sequence.ids)} (id {sequence.ids[place]})"
        if any(each.start <= place < len(each.ids) for each in lying):
            raise AgentFailed(
                f"{self._name} returned {which} to be trained a second time; mask it as prompt in all but one sequence"
            )
        raise AgentFailed(
            f"{self._name} returned {which} to be trained, but the engine did not sample it behind the tokens before "
            "it; build sequences from act.seqs and the ids you put on obs_queue, and mask everything else as prompt"
        )

    def _check_claims(self, sequence: TrainedSequence, chosen: Sequence[Generation], row: Row) -> None:
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

    def _readable(self, ids: Array, lying: Sequence[Generation]) -> list[dict[str, Any]]:
        """A sequence as a person reads it: stretches of prompt and of sampled tokens."""
        sampled = np.zeros(len(ids), np.bool_)
        for each in lying:
            sampled[each.answer] = True
        edges = np.flatnonzero(np.diff(sampled)) + 1
        return [
            {"role": "assistant" if sampled[part[0]] else "prompt", "content": self._tokenizer.decode(ids[part])}
            for part in np.split(np.arange(len(ids)), edges)
        ]


def _row(sequence: TrainedSequence, chosen: Sequence[Generation]) -> Row:
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
