"""An environment that judges answers to the questions of a dataset. It has no state: each step ends an episode."""

import asyncio
from typing import Any

from areal.api.errors import WorkflowError
from areal.config.experiment import DatasetConfig
from areal.dataset import get_custom_dataset
from areal.dataset.builtin import SPLITS
from areal.reward import exact_match_reward, math_answer_reward
from realhf.api.core.agent_api import EnvironmentService, question_id, register_environment

Task = dict[str, Any]


class MathCodeSingleStepEnv(EnvironmentService):
    def __init__(self, dataset_path: str, valid_path: str = "") -> None:
        """Paths are `builtin:NAME` or .jsonl files; held-out questions from another file need `valid_path`.

        An answer is right if it matches the task's `answer`, or any of its `solutions`. Answers to built-in tasks are
        compared digit for digit, those to questions in files as quantities (`areal.reward.math_answer`).
        """
        self._where = " and ".join(dict.fromkeys(filter(None, (dataset_path, valid_path))))
        self._tasks = {question_id(task): task for path in (valid_path, dataset_path) if path for task in _tasks(path)}
        self._reward = exact_match_reward if dataset_path.startswith("builtin:") else math_answer_reward

    async def step(self, action: tuple[str, list[str]]) -> tuple[None, list[float], bool, bool, dict[str, Any]]:
        qid, answers = action
        rewards = await asyncio.to_thread(self._verify, self._task(qid), answers)
        return None, rewards, True, False, {}

    def _verify(self, task: Task, answers: list[str]) -> list[float]:
        solutions = task.get("solutions") or [task["answer"]]
        return [max(self._reward(None, answer, [], [], solution) for solution in solutions) for answer in answers]

    def _task(self, qid: str) -> Task:
        task = self._tasks.get(qid)
        if task is None:
            raise WorkflowError(
                f"no question {qid!r} in {self._where}; pass the path of its dataset as dataset_path or valid_path"
            )
        if "answer" not in task and not task.get("solutions"):
            raise WorkflowError(
                f"question {qid!r} of {self._where} must have an `answer` or `solutions`, it has neither"
            )
        return task


def _tasks(path: str) -> list[Task]:
    """All of a dataset, whatever split an episode's task comes from."""
    config = DatasetConfig(path=path)
    if not path.startswith("builtin:"):
        return get_custom_dataset("train", config)
    return [task for split in SPLITS for task in get_custom_dataset(split, config)]


register_environment("math-code-single-step", MathCodeSingleStepEnv)
