from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from areal.api.cli_args import ConfigError, GenerationHyperparameters


def test_new_changes_a_copy_only() -> None:
    gconfig = GenerationHyperparameters(n_samples=4)
    assert gconfig.new(n_samples=1, temperature=0.5) == GenerationHyperparameters(n_samples=1, temperature=0.5)
    assert gconfig == GenerationHyperparameters(n_samples=4)


def test_new_refuses_values_that_mean_nothing() -> None:
    with pytest.raises(ConfigError, match=r"top_p must be a number in \(0, 1\], got 0"):
        GenerationHyperparameters().new(top_p=0)


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("temperature", value) for value in (NAN, INF, -INF, -1e-9, 1e308, 3.5e38, 10**400, True, "1", None)),
        *(("top_p", value) for value in (NAN, INF, 0, -0.5, 1.0000001, True, "1", None)),
        *(("top_k", value) for value in (-1, 2**63, 10**30, 1.0, NAN, False, "1", None)),
        *(("n_samples", value) for value in (0, -1, 10**30, 1.5, True)),
        *(("max_new_tokens", value) for value in (0, -1, 10**30, 1.5, INF, True)),
        *(("min_new_tokens", value) for value in (-1, 513, 10**30, 1.5, True)),
        *(("seed", value) for value in (2**64, -(2**63) - 1, 10**30, 1.5, NAN, True, "1")),
        *(("stop_token_ids", [value]) for value in (10**30, -(10**30), 1.5, True, "1", None)),
        ("stop_token_ids", 3),
        ("stop_token_ids", "3"),
        ("stop", "a text alone"),
        ("stop", [3]),
        ("greedy", 1),
        ("greedy", None),
    ],
)
def test_numbers_that_an_engine_cannot_take_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"^{name} must (be|lie) ") as refused:
        GenerationHyperparameters(**{name: value})
    assert len(str(refused.value)) < 300


def test_a_number_too_long_to_be_written_is_refused_like_any_other() -> None:
    with pytest.raises(ConfigError, match="top_k must be an integer"):
        GenerationHyperparameters(top_k=10**5000)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("temperature", value) for value in (0, 0.0, 1e-45, 1e-38, 1e-4, 2, 3.4e38)),
        *(("top_p", value) for value in (1e-300, 1e-46, 1, 1.0)),
        *(("top_k", value) for value in (0, 2**31)),
        *(("seed", value) for value in (None, 0, -(2**63), 2**64 - 1)),
        ("stop_token_ids", [-1, 10**9]),
    ],
)
def test_small_and_large_numbers_that_mean_something_pass(name: str, value: Any) -> None:
    assert getattr(GenerationHyperparameters(**{name: value}), name) == value


def test_numbers_of_numpy_become_pythons_own() -> None:
    gconfig = GenerationHyperparameters(
        temperature=np.float32(0.5), top_k=np.int64(3), seed=np.uint64(2**63), stop_token_ids=[np.int32(4)]
    )
    assert [type(value) for value in (gconfig.temperature, gconfig.top_k, gconfig.seed)] == [float, int, int]
    assert type(gconfig.stop_token_ids[0]) is int


@pytest.mark.parametrize("temperature", [0, 1e-300, 1e-38, 9.9e-5])
def test_temperatures_too_small_to_divide_by_are_greedy(temperature: float) -> None:
    gconfig = GenerationHyperparameters(temperature=temperature)
    assert gconfig.is_greedy
    assert gconfig.sampling_temperature == 1.0
    assert not GenerationHyperparameters(temperature=1e-4).is_greedy
    assert GenerationHyperparameters(temperature=1e-4).sampling_temperature == 1e-4


@pytest.mark.parametrize(("eos", "pad", "ids"), [(7, 9, [3, 7, 9]), (3, 9, [3, 9]), (7, 7, [3, 7]), (None, None, [3])])
def test_stop_and_pad_ids_join_the_stop_list_once(eos: int | None, pad: int | None, ids: list[int]) -> None:
    tokenizer = SimpleNamespace(eos_token_id=eos, pad_token_id=pad)
    gconfig = GenerationHyperparameters(stop_token_ids=[3])
    assert gconfig.new_with_stop_and_pad_token_ids(tokenizer).stop_token_ids == ids
    assert gconfig.stop_token_ids == [3]
