"""Problems of reasoning-gym as tasks, their splits, and their scorers as a reward function, with the real library."""

import copy
from typing import Any

import pytest

from areal.api.errors import DatasetError
from areal.config.experiment import DatasetConfig
from areal.dataset import get_custom_dataset

reasoning_gym = pytest.importorskip("reasoning_gym")

SMALL = "reasoning-gym:chain_sum?max_terms=2&max_digits=1"
NO_ORACLE = {"boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"}
"""They give no answer of their own."""
GENERATORS = sorted(set(reasoning_gym.factory.DATASETS) - {"composite"})


def tasks_of(path: str, split: str = "train", size: int | None = None) -> list[dict[str, Any]]:
    return get_custom_dataset(split, DatasetConfig(path=path, size=size))


def score(task: dict[str, Any], completion: str) -> float:
    from areal.reward import reasoning_gym_reward

    return reasoning_gym_reward("", completion, [], [], **copy.deepcopy(task))


def test_a_task_carries_what_its_scorer_needs() -> None:
    (task,) = tasks_of(SMALL + "&seed=3", size=1)
    assert task["messages"] == [{"role": "user", "content": task["question"]}]
    assert task["generator"] == {"name": "chain_sum", "settings": {"seed": 3, "max_terms": 2, "max_digits": 1}}
    assert score(task, task["answer"]) == 1.0
    assert score(task, f"<answer>x</answer> or <answer> {task['answer']} </answer>") == 1.0
    assert score(task, "100") < 0.1


def test_splits_share_no_question_and_hold_each_once() -> None:
    questions = {
        split: [task["question"] for task in tasks_of(SMALL + "&size=300", split)]
        for split in ("train", "valid", "test")
    }
    together = [question for each in questions.values() for question in each]
    assert len(set(together)) == len(together)
    assert len(questions["train"]) > len(questions["test"]) > len(questions["valid"]) > 0


def test_a_seed_repeats_and_another_differs() -> None:
    assert tasks_of(SMALL, size=5) == tasks_of(SMALL + "&seed=0", size=5) != tasks_of(SMALL + "&seed=900", size=5)


def test_a_system_prompt_of_the_library_comes_first() -> None:
    (task,) = tasks_of(SMALL + "&system_prompt=direct", size=1)
    assert [message["role"] for message in task["messages"]] == ["system", "user"]
    assert "<answer>" in task["messages"][0]["content"]


def test_what_a_scorer_cannot_parse_is_wrong() -> None:
    (task,) = tasks_of("reasoning-gym:prime_factorization", size=1)
    assert score(task, "nonsense (") == 0.0
    assert score(task, task["answer"]) == 1.0


@pytest.mark.parametrize(
    ("path", "size", "message"),
    [
        ("reasoning-gym:chains", None, "no generator 'chains'; there are ab, "),
        ("reasoning-gym:chain_sum?terms=2", None, "has no setting 'terms'; there are min_terms, "),
        ("reasoning-gym:chain_sum?min_terms", None, "settings must read as in reasoning-gym:NAME"),
        ("reasoning-gym:chain_sum?max_terms=1", None, "refuses its settings .*max_terms must be >= min_terms"),
        ("reasoning-gym:chain_sum?system_prompt=rude", None, "no system prompt 'rude'; there are DeepSeekZero, "),
        ("reasoning-gym:chain_sum?system_prompt=[1]", None, r"no system prompt \[1\]; there are DeepSeekZero, "),
        ("reasoning-gym:chain_sum?seed=null", None, "seed of reasoning-gym:chain_sum must be an integer, got None"),
        ("reasoning-gym:chain_sum?max_digits=6000&size=9", None, "cannot make the problems of .*4300 digits"),
        ("reasoning-gym:composite", None, "refuses its settings .*at least one dataset"),
        (SMALL + "&size=20", 100, "different train tasks among 20 problems, asked for 100"),
    ],
)
def test_what_is_wrong_is_refused_with_the_choices(path: str, size: int | None, message: str) -> None:
    with pytest.raises(DatasetError, match=message):
        tasks_of(path, size=size)


@pytest.mark.slow
@pytest.mark.parametrize("name", GENERATORS)
def test_every_generator_scores_its_own_answer_as_right(name: str) -> None:
    (task,) = tasks_of(f"reasoning-gym:{name}?size=20", size=1)
    if name in NO_ORACLE:
        assert 0.0 <= score(task, "nonsense (") < 1.0
    else:
        assert score(task, task["answer"]) == 1.0
