"""Which node of a Slurm allocation a command goes to, and what is asked of Slurm for a set of commands."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal.api.errors import PlacementRefused
from areal.infra.scheduler.base import Ask
from areal.infra.scheduler.slurm import SlurmNode, allocation_options, pack

asks = st.lists(
    st.builds(Ask, st.uuids().map(str), st.integers(0, 8), st.none() | st.integers(0, 4), st.integers(0, 4000)),
    min_size=1,
    max_size=8,
)
nodes = st.lists(
    st.builds(SlurmNode, st.uuids().map(str), st.integers(1, 16), st.integers(0, 8), st.none() | st.integers(0, 8000)),
    min_size=1,
    max_size=4,
)


@given(asks, nodes)
def test_a_node_never_gets_more_than_it_has(asks: list[Ask], nodes: list[SlurmNode]) -> None:
    try:
        places, free = pack(asks, nodes)
    except PlacementRefused:
        return
    assert [name for name, _ in places] == [ask.name for ask in asks]
    for node, left in zip(nodes, free, strict=True):
        here = [ask for ask, (_, chosen) in zip(asks, places, strict=True) if chosen.name == node.name]
        assert left.cpus == node.cpus - sum(ask.cpus for ask in here) >= 0
        assert left.gpus == node.gpus - sum(ask.gpus or 0 for ask in here) >= 0
        assert node.memory_mib is None or node.memory_mib >= sum(ask.memory_mib for ask in here)


@given(asks, st.integers(1, 4))
def test_an_allocation_of_the_size_that_was_asked_for_holds_every_command(asks: list[Ask], count: int) -> None:
    options = dict(option.lstrip("-").split("=") for option in allocation_options(asks, count))
    gpus = int(options.get("gres", "gpu:0").removeprefix("gpu:"))
    memory = int(options["mem"]) if "mem" in options else None
    total = [SlurmNode(f"n{index}", int(options["cpus-per-task"]), gpus, memory) for index in range(count)]
    assert sum(node.cpus for node in total) >= sum(ask.cpus for ask in asks)
    if count == 1:
        places, _ = pack(asks, total)
        assert len(places) == len(asks)


def test_commands_that_state_nothing_are_dealt_out_evenly() -> None:
    two = [SlurmNode("h1", 4, 0, None), SlurmNode("h2", 4, 0, None)]
    places, free = pack([Ask(f"worker {index}") for index in range(4)], two)
    assert sorted(node.name for _, node in places) == ["h1", "h1", "h2", "h2"]
    assert free == two


def test_what_does_not_fit_is_refused_with_what_is_free() -> None:
    with pytest.raises(
        PlacementRefused, match=r"no place for engine 0 \(8 gpus\); free are h1: 4 cpus, 2 gpus, 100 MiB"
    ):
        pack([Ask("engine 0", gpus=8)], [SlurmNode("h1", 4, 2, 100)])


def test_memory_that_slurm_does_not_count_is_no_limit() -> None:
    places, _ = pack([Ask("worker 0", memory_mib=10_000)], [SlurmNode("h1", 1, 0, None)])
    assert places[0][1].name == "h1"


def test_ranks_fill_one_node_after_the_other_and_engines_take_what_is_left() -> None:
    ranks = [Ask(f"rank {number}", gpus=1, together="rank") for number in range(6)]
    engines = [Ask(f"engine {number}", gpus=1) for number in range(2)]
    places, _ = pack([*ranks, *engines], [SlurmNode("n1", 16, 4, 64_000), SlurmNode("n2", 16, 4, 64_000)])
    assert [node.name for _, node in places] == ["n1"] * 4 + ["n2"] * 4


def test_ranks_that_state_nothing_are_dealt_out_evenly() -> None:
    ranks = [Ask(f"rank {number}", together="rank") for number in range(4)]
    places, _ = pack(ranks, [SlurmNode("n1", 16, 0, None), SlurmNode("n2", 16, 0, None)])
    assert sorted(node.name for _, node in places) == ["n1", "n1", "n2", "n2"]
