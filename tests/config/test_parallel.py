"""How many ranks a setting asks for, and what is refused."""

import pytest

from areal.config.errors import ConfigError
from areal.config.parallel import Ranks


@pytest.mark.parametrize(
    ("text", "ranks"), [("fsdp:d4", Ranks(4, 1)), ("fsdp:t2", Ranks(1, 2)), ("fsdp:d4t2", Ranks(4, 2))]
)
def test_ranks_are_data_parallel_groups_of_tensor_parallel_ones(text: str, ranks: Ranks) -> None:
    assert Ranks.parse(text) == ranks


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("fsdp", "must be fsdp:dN"),
        ("fsdp:d2.5", "must be fsdp:dN"),
        ("fsdp:d0", "d >= 1"),
        ("fsdp:d2t0", "t >= 1"),
        ("fsdp:d99999999999", "at most 65,536 ranks"),
    ],
)
def test_impossible_ranks_are_refused(text: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        Ranks.parse(text)
