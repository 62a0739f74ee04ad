"""A synchronous run follows from its seed: the same weights to the bit, whichever worker and group was the first.

Two workers with all their episodes at once, so that groups end in another order every time.
"""

import hashlib
import re
import signal
from pathlib import Path

import pytest
from real_runs import CONFIG, SCRIPT, SMALL, Run, Start, rows_of

from areal.cli.main import main

STEPS = 10
SYNCHRONOUS = (
    f"total_train_steps={STEPS}",
    "train_dataset.batch_size=8",
    "rollout.max_head_offpolicyness=0",
    "rollout.num_workers=2",
    "actor.recompute_logprob=true",
)
CRITIC = ("critic.path=builtin:tiny-math", "actor.group_baseline=none", "actor.gae_lambda=0.9", "gconfig.n_samples=1")


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory, tiny_math: Path) -> Path:
    """Where a run left its results that nothing disturbed. The others are compared with it, and nobody changes it."""
    directory = tmp_path_factory.mktemp("first")
    run = Run([SCRIPT, "--config", CONFIG, "trial_name=one", *SMALL, *SYNCHRONOUS], directory)
    try:
        assert run.wait() == 0, run.text
    finally:
        run.end()
    return directory / "runs/sort-digits/one"


def weights_of(run_dir: Path) -> list[str]:
    """Checksums of the last checkpoint's weights, those of a critic too."""
    files = sorted((run_dir / "checkpoints" / f"step-{STEPS:06d}").rglob("model.safetensors"))
    return [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]


def test_same_seed_gives_the_same_weights_to_the_bit_and_another_seed_others(
    example: Start, first: Path, run_dir: Path
) -> None:
    places = {"one": first, "again": run_dir.with_name("again"), "other": run_dir.with_name("other")}
    for trial, seed in [("again", 1), ("other", 2)]:
        run = example(*SYNCHRONOUS, f"seed={seed}", f"trial_name={trial}")
        assert run.wait() == 0, run.text
    weights = {trial: weights_of(place) for trial, place in places.items()}
    rows = {trial: rows_of(place / "metrics.jsonl") for trial, place in places.items()}
    held_out = {trial: [row["eval_reward"] for row in rows[trial] if "eval_reward" in row] for trial in places}
    for trial in places:
        assert any(row.get("grad_norm") for row in rows[trial]), f"nothing was trained in {trial!r}"
    assert weights["one"] == weights["again"] != weights["other"]
    assert held_out["one"] == held_out["again"]


def test_run_is_sampled_again_to_the_same_bits(first: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(first), "--regenerate"]) == 0
    assert capsys.readouterr().out.endswith(f"{STEPS} of {STEPS} steps bit-equal\n")


@pytest.mark.parametrize("critic", [(), CRITIC], ids=["groups", "critic"])
def test_run_that_was_interrupted_ends_with_the_weights_of_one_that_was_not(
    example: Start, first: Path, run_dir: Path, critic: tuple[str, ...]
) -> None:
    settings = (*SYNCHRONOUS, *critic)
    whole = first
    if critic:
        run, whole = example(*settings), run_dir
        assert run.wait() == 0, run.text
    run = example(*settings, "trial_name=interrupted")
    run.wait_for(rf"^step [1-5]/{STEPS} ")
    run.kill(signal.SIGINT)
    assert run.wait() == 130, run.text
    assert re.search(rf"^stopped after step \d of {STEPS}; everything is saved", run.text, re.MULTILINE)
    run = example(*settings, "trial_name=interrupted")
    assert run.wait() == 0, run.text
    assert "(resuming after step " in run.text
    assert weights_of(run_dir.with_name("interrupted")) == weights_of(whole)
    assert len(weights_of(whole)) == (2 if critic else 1)
