"""How old an episode and a group are, and how much of them is trained."""

import numpy as np
import pytest

from areal.api.messages import FEW_TOKENS, Episode, GroupResult, Row


def row(versions: list[int]) -> Row:
    """-1 = a token of the prompt."""
    array = np.array(versions, dtype=np.int32)
    zeros = np.zeros(len(versions), dtype=np.float32)
    return Row(np.arange(len(versions)), array >= 0, zeros, array, zeros, np.minimum(array, 0), zeros + 1, reward=1.0)


def test_versions_and_tokens_are_those_of_sampled_tokens() -> None:
    episode = Episode([row([-1, -1, 3, 3]), row([-1, 4])], reward=1.0)
    assert (episode.oldest_version, episode.newest_version, episode.trained_tokens) == (3, 4, 3)


@pytest.mark.parametrize("length", [1, FEW_TOKENS, FEW_TOKENS + 1, 1000])
def test_versions_of_rows_of_any_length_are_plain_numbers(length: int) -> None:
    versions = [-1, *range(7, 7 + length)]
    episode = Episode([row(versions[::-1]), row([-1])], reward=1.0)
    found = (episode.oldest_version, episode.newest_version, episode.trained_tokens)
    assert found == (7, 6 + length, length)
    assert [type(each) for each in found] == [int, int, int]


def test_episode_that_trains_nothing_has_no_version() -> None:
    episode = Episode([row([-1])], reward=0.0)
    assert (episode.oldest_version, episode.newest_version, episode.trained_tokens) == (None, None, 0)


def test_group_is_as_old_as_its_oldest_episode() -> None:
    episodes = [Episode([row([-1, 5])], 0.0), Episode([row([-1, 2, 6])], 0.0), Episode([row([-1])], 0.0)]
    assert GroupResult(0, episodes, [], {}).oldest_version == 2
