"""Whole rounds on another device than the CPU: a simulated one, in a process of its own (`simulated_round.py`)."""

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

ROUND = Path(__file__).with_name("simulated_round.py")
ROUND_SECONDS = 600.0
"""A minute of processor time, on a machine that may be busy."""
pytestmark = [pytest.mark.slow, pytest.mark.timeout(ROUND_SECONDS + 60)]
models = pytest.mark.parametrize("model", ["builtin", "llama", "gpt2", "vision"])

EXACT = 1e-4
"""Two computations of one log-prob in float32 differ by less."""


@pytest.fixture(scope="module")
def rounds() -> dict[str, Any]:
    """What `simulated_round.py` prints; it fails wherever tensors of two devices meet."""

    async def run() -> dict[str, Any]:
        paths = os.pathsep.join([str(ROUND.parent), *(path for path in sys.path if path)])
        environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
        process = await asyncio.create_subprocess_exec(
            sys.executable, ROUND, env=environment, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
        try:
            printed, errors = await asyncio.wait_for(process.communicate(), ROUND_SECONDS)
        finally:
            if process.returncode is None:
                process.kill()
        assert process.returncode == 0, errors.decode()[-8000:]
        figures: dict[str, Any] = json.loads(printed.decode().splitlines()[-1])
        return figures

    return asyncio.run(run())


def test_the_simulated_device_refuses_to_mix(rounds: dict[str, Any]) -> None:
    assert {"sum", "index", "single number"} <= set(rounds["refused"])


@models
def test_engine_and_trainer_there_compute_what_a_trainer_on_the_cpu_does(model: str, rounds: dict[str, Any]) -> None:
    found = rounds[model]
    assert found["device"] == "sim:0"
    assert found["sampled"] < EXACT
    assert found["recomputed"] < EXACT
    assert found["trained"] < EXACT
    assert found["step"] == pytest.approx(found["step_on_cpu"], rel=1e-3)


@models
def test_the_update_of_a_run_with_its_reference_is_computed_there(model: str, rounds: dict[str, Any]) -> None:
    there, here = rounds[model]["update"], rounds[model]["update_on_cpu"]
    assert there["trained_tokens"] == here["trained_tokens"] > 0
    assert there["loss"] == pytest.approx(here["loss"], rel=1e-2, abs=1e-4)
    assert there["max_logprob_difference"] < EXACT


@models
def test_published_weights_reach_the_engine_between_two_tokens(model: str, rounds: dict[str, Any]) -> None:
    assert rounds[model]["versions"] == [0, 1]
    assert rounds[model]["published"] < EXACT


@pytest.mark.parametrize("model", ["builtin", "llama", "vision"])
def test_an_adapter_is_added_to_the_weights_there(model: str, rounds: dict[str, Any]) -> None:
    assert rounds[model]["adapter"] < EXACT


@models
def test_a_decode_step_sends_a_few_tensors_and_reads_two(model: str, rounds: dict[str, Any]) -> None:
    assert rounds[model]["crossings_per_token"] == {"to the device": 3, "to the host": 2}


@models
def test_a_training_step_is_read_only_after_its_last_pass(model: str, rounds: dict[str, Any]) -> None:
    found = rounds[model]
    by_transformers = 0 if "decoder" in found else 2 * found["passes"]  # it looks at positions, and for images
    assert found["passes"] > 1
    assert found["to_the_host_per_step"] <= 3 + by_transformers


@models
def test_a_checkpoint_goes_on_with_another_device(model: str, rounds: dict[str, Any]) -> None:
    there, here = rounds[model]["resumed"]["loss"]
    assert rounds[model]["resumed"]["devices"] == ["cpu"]
    assert there == pytest.approx(here, rel=1e-3)


@models
def test_bfloat16_products_leave_weights_gradients_and_logprobs_in_float32(model: str, rounds: dict[str, Any]) -> None:
    found = rounds[model]["bfloat16"]
    assert found["dtypes"] == ["torch.float32"]
    assert EXACT < found["difference"] < 1.0
    assert found["loss"][0] == pytest.approx(found["loss"][1], rel=0.05)


@pytest.mark.parametrize("model", ["builtin", "llama"])
def test_the_decoder_generates_in_bfloat16_and_computes_layers_again(model: str, rounds: dict[str, Any]) -> None:
    again, once = rounds[model]["decoder"]["grad_norm"]
    assert EXACT < rounds[model]["decoder"]["sampled"] < 1.0
    assert again == pytest.approx(once, rel=1e-3)
