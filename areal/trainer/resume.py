"""What a run goes on from: its newest intact checkpoint, and what its store has beyond that.

The checkpoint has the weights of one step; the store may know later ones. Those whose batches it keeps are trained
again from them, which generates nothing and leads to the same weights. Steps beyond those are taken back, and their
tasks run again. Groups that are ready are trained as if the run had never ended.
"""

from dataclasses import dataclass
from typing import Any

from areal.config.loader import build
from areal.store.reader import StoreReader
from areal.store.writer import StoreWriter
from areal.trainer.journal import Account
from areal.trainer.tasks import Settled


@dataclass(frozen=True)
class Standing:
    """How far a run has come."""

    step: int
    """Steps that have been taken."""
    saved_step: int
    """Those of the checkpoint; the others are to be trained again."""
    account: Account
    saved_account: Account
    """As of the checkpoint."""
    settled: Settled
    """What the checkpoint knows: tasks that were trained or rejected by then."""
    notes: tuple[str, ...] = ()
    """What to tell the user."""


def find_standing(store: StoreWriter, saved: dict[str, Any]) -> Standing:
    """Make the store agree with the state of a checkpoint, or of a run that has none."""
    step: int = saved["step"]
    known_settled = saved.get("settled", {"below": 0, "beyond": []})
    settled = Settled(known_settled["below"], set(known_settled["beyond"]))
    notes = []
    with StoreReader(store.path.parent) as reader:
        known = {each.step: each for each in reader.steps()}
        last, has_groups = max(known, default=0), bool(reader.states())
        while step + 1 in known and reader.keeps_batch(step + 1):
            step += 1
        account = _account(reader, step) or build(Account, saved.get("account", {}))
    if last > step:
        if has_groups:
            notes.append(
                f"steps {step + 1} to {last} are taken again: their batches are not kept, and no checkpoint has them"
            )
        store.take_back(step)
    if last < step and known:
        notes.append(
            f"the run store ends with step {last}, the checkpoint is of step {step}; what happened between is not in "
            "the store, and nothing that was trained is trained again"
        )
    if last < step:
        store.settle(step, settled.below, settled.beyond)
    store.flush()
    return Standing(step, saved["step"], account, build(Account, saved.get("account", {})), settled, tuple(notes))


def _account(reader: StoreReader, step: int) -> Account | None:
    """The totals after a step and the evaluations that followed it; None if the store does not know them."""
    kept = [each.account for each in reader.steps(after=step - 1) if each.step == step]
    kept += [each["account"] for each in reader.evaluations() if each["step"] == step]
    return build(Account, kept[-1]) if kept else None
