"""The order of tasks is fixed by the seed, endless, and goes on exactly where a run stopped."""

from itertools import islice

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from areal.trainer.tasks import Settled, digest_of_tasks, task_stream

Seen = list[tuple[int, int]]


def draw(size: int, count: int, settled: Settled | None = None, *, seed: int = 1, shuffle: bool = True) -> Seen:
    tasks = [{"number": number} for number in range(size)]
    stream = task_stream(tasks, seed, settled or Settled(), shuffle=shuffle)
    return [(place, task["number"]) for place, task in islice(stream, count)]


@given(st.permutations(list(range(12))), st.integers(0, 12))
def test_settled_knows_exactly_what_was_added_in_whatever_order(order: list[int], count: int) -> None:
    settled = Settled()
    for number in order[:count]:
        settled.add(number)
    assert {number for number in range(20) if number in settled} == set(order[:count])
    assert settled.below not in settled
    assert all(number > settled.below for number in settled.beyond)


@given(st.integers(1, 7), st.integers(0, 20), st.data())
def test_resumed_stream_gives_what_was_not_settled_and_goes_on_alike(
    size: int, taken: int, data: st.DataObject
) -> None:
    straight = draw(size, 40)
    settled = Settled()
    done = data.draw(st.sets(st.sampled_from(straight[:taken]))) if taken else set()
    for place, _ in done:
        settled.add(place)
    resumed = draw(size, 20, settled)
    assert resumed == [each for each in straight if each not in done][:20]


@given(st.integers(1, 9), st.integers(0, 5))
def test_each_epoch_holds_every_task_once(size: int, seed: int) -> None:
    seen = draw(size, 3 * size, seed=seed)
    assert [place for place, _ in seen] == list(range(3 * size))
    for epoch in range(3):
        numbers = [number for _, number in seen[epoch * size : (epoch + 1) * size]]
        assert sorted(numbers) == list(range(size))


def test_epochs_and_seeds_differ_and_shuffle_can_be_off() -> None:
    first = [number for _, number in draw(50, 100)]
    assert first[:50] != first[50:]
    assert first != [number for _, number in draw(50, 100, seed=2)]
    assert [number for _, number in draw(5, 10, shuffle=False)] == [*range(5), *range(5)]


def test_what_is_settled_while_the_stream_runs_does_not_disturb_it() -> None:
    settled = Settled()
    tasks = [{"number": number} for number in range(4)]
    stream = task_stream(tasks, 1, settled, shuffle=False)
    seen = []
    for _ in range(12):
        place, _ = next(stream)
        seen.append(place)
        settled.add(place)
    assert seen == list(range(12))


def test_the_digest_of_tasks_goes_by_their_content() -> None:
    task = {"a": [1, {"b": 2.5}], "image": np.arange(6).reshape(2, 3), "raw": b"\0", "big": 10**30, "what": object()}
    same = {"what": object(), "big": 10**30, "raw": b"\0", "image": np.arange(6).reshape(2, 3), "a": [1, {"b": 2.5}]}
    assert digest_of_tasks([task]) == digest_of_tasks([same])
    changes = [{"a": [1, {"b": 2.25}]}, {"image": np.arange(1, 7).reshape(2, 3)}, {"raw": b"\1"}, {"big": 10**30 + 1}]
    assert len({digest_of_tasks([task | change]) for change in [{}, *changes]}) == 5
    assert digest_of_tasks([task, same]) != digest_of_tasks([task])
    assert digest_of_tasks([{"x": 1}, {"x": 2}]) != digest_of_tasks([{"x": 2}, {"x": 1}])


def test_the_digest_sees_images_in_a_task_that_json_cannot_say_at_once() -> None:
    first, second = (Image.new("RGB", (2, 2), colour) for colour in ("red", "blue"))
    assert digest_of_tasks([{"image": first, "big": 10**30}]) != digest_of_tasks([{"image": second, "big": 10**30}])
    assert digest_of_tasks([{"image": first}]) == digest_of_tasks([{"image": first.copy()}])
