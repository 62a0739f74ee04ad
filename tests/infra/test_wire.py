import dataclasses
from collections import Counter
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from areal.api.engine_api import EngineHealth, WeightUpdate
from areal.api.errors import RejectReason
from areal.api.io_struct import ModelRequest, ModelResponse
from areal.api.messages import Episode, GroupResult, GroupTask, Rejection, Row
from areal.config.rollout import GenerationHyperparameters
from areal.infra.rpc.wire import Wire, api_wire


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


class Shade(str, Enum):  # noqa: UP042  (its text is not its value)
    DARK = "dark"


@dataclass(frozen=True, slots=True)
class Point:
    place: tuple[int, int]
    colours: list[Colour] = field(default_factory=list)
    by_colour: dict[Colour, int] = field(default_factory=dict)
    favourite: Colour | None = None


@dataclass
class Nothing:
    pass


def make_row(length: int) -> Row:
    ids = np.arange(length, dtype=np.int32)
    floats = np.linspace(-1, 0, length, dtype=np.float32)
    return Row(ids, ids > 2, floats, ids, floats, ids, floats, reward=1.0, truncated=True)


def assert_same(left: Any, right: Any) -> None:
    assert type(left) is type(right)
    if isinstance(left, np.ndarray):
        assert left.dtype == right.dtype
        np.testing.assert_array_equal(left, right)
    elif dataclasses.is_dataclass(left):
        for f in dataclasses.fields(left):
            assert_same(getattr(left, f.name), getattr(right, f.name))
    elif isinstance(left, list):
        assert len(left) == len(right)
        for a, b in zip(left, right, strict=True):
            assert_same(a, b)
    elif isinstance(left, dict):
        assert list(left) == list(right)
        for key in left:
            assert_same(left[key], right[key])
    else:
        assert left == right or (left != left and right != right)


scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary()
plain = st.recursive(
    scalars,
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers(), inner),
    max_leaves=20,
)


@given(plain)
def test_plain_values_come_back_equal(value: Any) -> None:
    wire = Wire()
    again = wire.unpack(wire.pack(value))
    assert wire.pack(again) == wire.pack(value)
    assert_same(value, again)


@given(
    hnp.arrays(
        hnp.boolean_dtypes() | hnp.integer_dtypes() | hnp.floating_dtypes(sizes=(16, 32, 64)),
        hnp.array_shapes(min_dims=0, max_dims=3, min_side=0),
    )
)
def test_arrays_come_back_with_type_shape_and_values(array: Any) -> None:
    wire = Wire()
    again = wire.unpack(wire.pack({"a": array}))["a"]
    assert again.shape == array.shape
    assert_same(array, again)


@given(
    st.lists(st.integers(0, 2**31 - 1), min_size=1), st.lists(st.floats(-50, 0)), st.sampled_from(["stop", "length"])
)
def test_answers_of_the_engine_come_back_equal(ids: list[int], logprobs: list[float], reason: Any) -> None:
    answer = ModelResponse(ids, ids, logprobs, [0] * len(ids), reason, {0: "a", 7: "b"})
    wire = api_wire()
    without_prompt = dataclasses.replace(answer, input_tokens=[])  # which the caller has
    assert wire.unpack(wire.pack(answer)) == without_prompt


def test_group_result_comes_back_whole_with_its_enum_and_integer_keys() -> None:
    episode = Episode([make_row(3), make_row(9)], 1.0, [{"role": "user", "content": "Sort 21"}], {"turns": 2.0}, 2, 0.5)
    result = GroupResult(7, [episode], [Rejection(RejectReason.TIMEOUT, "600 s")], {3: "abc"})
    wire = api_wire()
    again = wire.unpack(wire.pack(result))
    assert_same(again, result)
    assert again.rejections[0].reason is RejectReason.TIMEOUT
    assert again.digests == {3: "abc"}


def test_rows_of_a_group_travel_field_by_field_and_stay_their_episodes() -> None:
    rows = [make_row(length) for length in (3, 9, 1)]
    rows[1].images, rows[2].truncated_completions = [b"png"], [0]
    result = GroupResult(7, [Episode(rows[:2], 1.0), Episode([], 0.0), Episode(rows[2:], 2.0, calls=3)], [], {})
    wire = api_wire()
    again = wire.unpack(wire.pack(result))
    assert_same(again, result)
    for row in again.episodes[0].rows:
        row.returns += 1.0  # what arrives can be written to, each row for itself
    assert_same(again.episodes[2], result.episodes[2])


def test_a_group_that_does_not_add_up_is_refused() -> None:
    wire = api_wire()
    (marker, columns, episodes, *rest) = wire._reduce(GroupResult(7, [Episode([make_row(3)], 1.0)], [], {}))
    wrong: list[list[Any]] = [
        [marker, columns, episodes, *rest, 1],
        [marker, columns[1:], episodes, *rest],
        [marker, columns, [[2, *episodes[0][1:]]], *rest],
        [marker, columns, [[-1, *episodes[0][1:]]], *rest],
        [marker, columns, [episodes[0][:-1]], *rest],
        [marker, [([2], columns[0][1]), *columns[1:]], episodes, *rest],
        [marker, [([1, 2], columns[0][1]), *columns[1:]], episodes, *rest],
    ]
    for parts in wrong:
        with pytest.raises((TypeError, ValueError)):
            wire.unpack(wire.pack(parts))


def test_unpacked_arrays_can_be_written_to() -> None:
    wire = Wire()
    array = wire.unpack(wire.pack(np.zeros(3)))
    array[0] = 1.0
    assert array.tolist() == [1.0, 0.0, 0.0]


def test_array_that_is_not_contiguous_travels_by_value() -> None:
    wire = Wire()
    array = np.arange(12).reshape(3, 4)[:, ::2]
    np.testing.assert_array_equal(wire.unpack(wire.pack(array)), array)


def test_request_leaves_its_tokenizer_at_home() -> None:
    request = ModelRequest("r1", [1, 2], GenerationHyperparameters(seed=3, stop=["\n"]), tokenizer=object())
    wire = api_wire()
    again = wire.unpack(wire.pack(request))
    assert again == ModelRequest("r1", [1, 2], GenerationHyperparameters(seed=3, stop=["\n"]))


@pytest.mark.parametrize(
    "message",
    [
        WeightUpdate(3, "d", "/w"),
        EngineHealth(1, "d", 2, 3, False),
        GroupTask(1, b"\x80", 8, is_eval=True),
    ],
)
def test_small_messages_come_back_equal(message: Any) -> None:
    wire = api_wire()
    assert wire.unpack(wire.pack([message])) == [message]


def test_frozen_slotted_class_gets_its_tuples_and_enums_back() -> None:
    wire = Wire([Point, Nothing, Colour])
    point = Point((1, 2), [Colour.RED], {Colour.BLUE: 3}, Colour.RED)
    assert_same(wire.unpack(wire.pack(point)), point)
    assert_same(wire.unpack(wire.pack([Point((0, 0)), Nothing()])), [Point((0, 0)), Nothing()])


class Pair(NamedTuple):
    left: int
    right: int


@pytest.mark.parametrize(
    ("value", "received"),
    [
        ((1, (2, 3)), (1, (2, 3))),
        ({(1, 2): [()]}, {(1, 2): [()]}),
        (Pair(1, 2), (1, 2)),
        (Counter(a=1), {"a": 1}),
        ([Colour.RED, Shade.DARK], ["red", "dark"]),
    ],
)
def test_tuples_stay_tuples_and_subclasses_of_plain_types_become_plain(value: Any, received: Any) -> None:
    wire = Wire()
    again = wire.unpack(wire.pack(value))
    assert again == received
    assert type(again) is type(received)


def test_integers_beyond_64_bits_and_lone_surrogates_travel() -> None:
    wire = Wire()
    for value in (2**64, -(2**200), "\ud800 half a character"):
        assert wire.unpack(wire.pack(value)) == value


def test_numpy_scalars_become_plain_numbers() -> None:
    wire = Wire()
    assert wire.unpack(wire.pack([np.int64(3), np.float32(0.5), np.bool_(True)])) == [3, 0.5, True]


def test_unknown_object_is_refused_by_name_with_what_may_be_sent() -> None:
    with pytest.raises(
        TypeError, match=r"cannot send object .*; send plain values .*numpy arrays, torch tensors or one of \['Point'\]"
    ):
        Wire([Point]).pack({"x": object()})


def test_array_of_objects_is_refused() -> None:
    with pytest.raises(TypeError, match="numbers or booleans, got dtype object"):
        Wire().pack(np.array([None]))


def test_type_that_the_receiver_does_not_know_is_named() -> None:
    with pytest.raises(TypeError, match="received a Point, which this wire does not know"):
        Wire().unpack(Wire([Point]).pack(Point((1, 2))))


def test_omitted_field_needs_a_default() -> None:
    with pytest.raises(TypeError, match="'place' is not sent, so it needs a default"):
        Wire([Point], omit={Point: ["place"]})
