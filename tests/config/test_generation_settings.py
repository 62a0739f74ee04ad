from types import SimpleNamespace

import pytest

from areal.api.cli_args import ConfigError, GenerationHyperparameters


def test_new_changes_a_copy_only() -> None:
    gconfig = GenerationHyperparameters(n_samples=4)
    assert gconfig.new(n_samples=1, temperature=0.5) == GenerationHyperparameters(n_samples=1, temperature=0.5)
    assert gconfig == GenerationHyperparameters(n_samples=4)


def test_new_refuses_values_that_mean_nothing() -> None:
    with pytest.raises(ConfigError, match=r"top_p must lie in \(0, 1\], got 0"):
        GenerationHyperparameters().new(top_p=0)


@pytest.mark.parametrize(("eos", "pad", "ids"), [(7, 9, [3, 7, 9]), (3, 9, [3, 9]), (7, 7, [3, 7]), (None, None, [3])])
def test_stop_and_pad_ids_join_the_stop_list_once(eos: int | None, pad: int | None, ids: list[int]) -> None:
    tokenizer = SimpleNamespace(eos_token_id=eos, pad_token_id=pad)
    gconfig = GenerationHyperparameters(stop_token_ids=[3])
    assert gconfig.new_with_stop_and_pad_token_ids(tokenizer).stop_token_ids == ids
    assert gconfig.stop_token_ids == [3]
