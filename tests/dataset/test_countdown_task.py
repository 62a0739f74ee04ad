from areal.config.experiment import DatasetConfig
from areal.dataset import get_custom_dataset
from areal.dataset.builtin import COUNTDOWN, SPLITS, _countdown_problems
from areal.reward import countdown_reward


def test_every_problem_has_an_answer_that_is_rewarded() -> None:
    tasks = [COUNTDOWN.problem(number).as_task() for number in range(COUNTDOWN.size)]
    assert all(countdown_reward("", task["answer"], [], [], **task) == 1.0 for task in tasks)
    assert len(tasks) == len(_countdown_problems())
    assert all(task["target"] >= 0 and len(task["numbers"]) == 3 for task in tasks)


def test_no_problem_is_posed_twice_and_each_is_in_one_split() -> None:
    asked = [problem.question for split in SPLITS for problem in COUNTDOWN.problems(split)]
    assert len(asked) == len(set(asked)) == COUNTDOWN.size


def test_it_is_a_built_in_dataset_that_carries_what_its_reward_needs() -> None:
    (task,) = get_custom_dataset(split="test", dataset_config=DatasetConfig(path="builtin:countdown", size=1))
    numbers = " ".join(map(str, task["numbers"]))
    assert task["messages"] == [{"role": "user", "content": f"Make {task['target']} from {numbers}"}]
