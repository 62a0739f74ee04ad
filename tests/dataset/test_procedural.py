"""Built-in problems: right answers, and splits that share nothing and are shaped alike."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal.config.experiment import DatasetConfig
from areal.dataset import get_custom_dataset
from areal.dataset.builtin import SPLITS, TASKS, Problem, split_of

TEXT_TASKS = [name for name in TASKS if name != "shapes"]


@pytest.mark.parametrize("name", TEXT_TASKS)
def test_splits_are_disjoint_and_cover_every_problem(name: str) -> None:
    task = TASKS[name]
    splits = {split: [problem.question for problem in task.problems(split)] for split in SPLITS}
    everything = [question for questions in splits.values() for question in questions]
    assert len(everything) == len(set(everything)) == task.size
    for split, share in SPLITS.items():
        assert len(splits[split]) / task.size == pytest.approx(len(share) / 100, abs=0.02)


@pytest.mark.parametrize("name", TASKS)
def test_the_held_out_split_has_at_least_512_problems(name: str) -> None:
    assert len(list(TASKS[name].problems("test"))) >= 512


def test_the_seed_orders_problems_and_changes_no_split() -> None:
    orders = [[problem.question for problem in TASKS["sums"].problems("test", seed)] for seed in (1, 1, 2)]
    assert orders[0] == orders[1] != orders[2]
    assert sorted(orders[0]) == sorted(orders[2])


def test_a_split_is_not_skewed_by_the_number() -> None:
    last_digits = [problem.question[-1] for problem in TASKS["sort-digits"].problems("test")]
    counts = [last_digits.count(digit) for digit in "0123456789"]
    assert min(counts) > 0.7 * len(last_digits) / 10


def test_answers_are_right() -> None:
    for problem in TASKS["sort-digits"].problems("valid"):
        digits = problem.question.removeprefix("Sort ")
        assert len(digits) == 4
        assert problem.answer == "".join(sorted(digits))
    for problem in TASKS["sums"].problems("valid"):
        first, second = problem.question.removeprefix("What is ").removesuffix("?").split(" + ")
        assert problem.answer == str(int(first) + int(second))

    for problem in TASKS["arithmetic"].problems("valid"):
        calculation = problem.question.removeprefix("What is ").removesuffix("?")
        assert problem.answer == str(eval(calculation))


def test_arithmetic_has_two_and_three_operands_and_each_also_alone() -> None:
    two, three, both = (
        [problem.question for problem in TASKS[name].problems("test")]
        for name in ("arithmetic-2", "arithmetic-3", "arithmetic")
    )
    assert {len(question.split()) for question in two} == {5}
    assert {len(question.split()) for question in three} == {7}
    assert sorted(two + three) == sorted(both)


@pytest.mark.parametrize(("name", "first", "last"), [("arithmetic-2", 3, 3), ("arithmetic-3", 3, 5)])
def test_every_operator_is_as_frequent_in_each_split(name: str, first: int, last: int) -> None:
    for split in SPLITS:
        words = [problem.question.split() for problem in TASKS[name].problems(split)]
        for place in {first, last}:
            counts = Counter(each[place] for each in words)
            assert set(counts) == set("+-*")
            assert min(counts.values()) > 0.8 * len(words) / 3


@given(st.text(), st.text(), st.text())
def test_a_split_depends_on_the_question_alone(question: str, answer: str, other: str) -> None:
    assert split_of(Problem(question, answer)) == split_of(Problem(question, other))


@pytest.mark.parametrize("name", TASKS)
def test_every_task_is_found_by_name(name: str) -> None:
    test, train = (
        get_custom_dataset(split, DatasetConfig(path=f"builtin:{name}", size=8)) for split in ("test", "train")
    )
    assert len(test) == len(train) == 8
    assert all({"messages", "answer"} <= set(each) for each in test + train)


def test_a_task_is_messages_and_an_answer() -> None:
    problem = next(TASKS["sums"].problems("train"))
    assert split_of(problem) == "train"
    assert problem.as_task() == {"messages": [{"role": "user", "content": problem.question}], "answer": problem.answer}


def test_get_custom_dataset_gives_a_splits_problems() -> None:
    tasks = get_custom_dataset(split="test", dataset_config=DatasetConfig(path="builtin:sort-digits"), tokenizer=None)
    assert tasks == [problem.as_task() for problem in TASKS["sort-digits"].problems("test")]
