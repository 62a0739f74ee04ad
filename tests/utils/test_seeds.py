from itertools import product

from areal.utils.seeds import CallSeeds, derived_seed


def test_a_seed_follows_from_all_of_its_parts() -> None:
    seeds = [
        derived_seed(run, kind, task, sample)
        for run, kind, task, sample in product(range(4), "ab", range(20), range(8))
    ]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert derived_seed(1, 23) != derived_seed(12, 3)


def test_seeds_stay_the_same_from_release_to_release() -> None:
    assert derived_seed(1, "train", 7, 0) == 2936970262906446627


def test_a_call_is_known_by_its_prompt_and_how_often_that_came_before() -> None:
    one, other = CallSeeds(5), CallSeeds(5)
    first = [one.next(b"12", None), one.next(b"12", None), one.next(b"123", None)]
    assert [other.next(b"123", None), other.next(b"12", None), other.next(b"12", None)] == first[::-1][:1] + first[:2]
    assert len(set(first)) == 3
    assert CallSeeds(6).next(b"12", None) not in first


def test_a_call_that_got_no_answer_leaves_its_seed_to_the_next() -> None:
    seeds = CallSeeds(5)
    one, two, three = [seeds.next(b"12", None) for _ in range(3)]
    seeds.give_back(b"12", two)
    seeds.give_back(b"12", one)
    seeds.give_back(b"12", seeds.next(b"12", 42))
    seeds.give_back(b"1", three)
    again = [seeds.next(b"12", None) for _ in range(3)]
    assert again[:2] == [one, two]
    assert again[2] not in (one, two, three)


def test_a_seed_that_was_asked_for_repeats_within_an_episode_only() -> None:
    seeds = CallSeeds(5)
    assert seeds.next(b"1", 42) == seeds.next(b"1", 42) == seeds.next(b"2", 42)
    assert seeds.next(b"1", 42) != seeds.next(b"1", 43)
    assert seeds.next(b"1", 42) != CallSeeds(6).next(b"1", 42)
