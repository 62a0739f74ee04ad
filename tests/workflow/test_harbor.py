"""Harbor tasks in the real sandbox: what the model's script leaves is what the tests see, and nothing else."""

import asyncio
import os
import queue
import threading
from pathlib import Path
from typing import Any

import pytest

from areal.api.errors import WorkflowError
from areal.config.experiment import DatasetConfig
from areal.config.rollout import GenerationHyperparameters
from areal.dataset import get_custom_dataset
from areal.workflow import harbor
from areal.workflow.harbor import HarborWorkflow

pytestmark = pytest.mark.slow  # the sandbox is a process

GCONFIG = GenerationHyperparameters(max_new_tokens=400)
DOCKERFILE = "FROM python:3.11\nENV COLOUR=red\nWORKDIR /app\nCOPY number.txt .\nRUN echo built > /app/built.txt\n"
TEST = """
cd /app
[ "$(cat answer.txt 2>/dev/null)" = "1259" ] && [ "$(cat built.txt)" = built ] && [ "$COLOUR" = red ]
echo $((1 - $?)) > /logs/verifier/reward.txt
"""


def task(
    directory: Path, test: str = TEST, dockerfile: str = DOCKERFILE, query: str = "", toml: str = ""
) -> dict[str, Any]:
    files = {
        "instruction.md": "Sort 5291",
        "task.toml": toml or "[agent]\ntimeout_sec = 100\n[verifier]\ntimeout_sec = 100\n",
        "environment/Dockerfile": dockerfile,
        "environment/number.txt": "5291",
        "tests/test.sh": test,
    }
    for name, text in files.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(text, encoding="utf-8")
    (found,) = get_custom_dataset("train", DatasetConfig(path=f"harbor:{directory}{query}"))
    return found


async def rewards(tokenizer: Any, says: Any, data: dict[str, Any], **settings: Any) -> list[float]:
    rows = await HarborWorkflow(GCONFIG, tokenizer, **settings).arun_episode(says.engine(), data)
    return [float(reward) for reward in rows["rewards"]]


@pytest.mark.parametrize(
    ("script", "reward"),
    [("grep -o . number.txt | sort | tr -d '\\n' > answer.txt", 1.0), ("echo 5291 > answer.txt", 0.0), ("exit 3", 0.0)],
)
async def test_a_script_is_run_in_the_environment_and_scored(
    tokenizer: Any, speaker: Any, tmp_path: Path, script: str, reward: float
) -> None:
    says = speaker(lambda prompt: f"```bash\n{script}\n```")
    assert await rewards(tokenizer, says, task(tmp_path)) == [reward]
    assert "Sort 5291" in says.prompts[0]


async def test_a_path_that_a_dockerfile_adds_to_keeps_the_rest(tokenizer: Any, speaker: Any, tmp_path: Path) -> None:
    dockerfile = "FROM x\nENV PATH=/app/bin:$PATH\nRUN mkdir bin && echo 'echo 1259' > bin/solve && chmod +x bin/solve"
    test = "[ $(solve) = 1259 ] && python3 -c 1; echo $((1 - $?)) > /logs/verifier/reward.txt"
    assert await rewards(tokenizer, speaker(lambda prompt: "true"), task(tmp_path, test, dockerfile)) == [1.0]


async def test_several_turns_show_what_was_printed_and_keep_the_files(
    tokenizer: Any, speaker: Any, tmp_path: Path
) -> None:
    def answer(prompt: str) -> str:
        if "file says 5291" not in prompt:
            return "```\necho 1259 > answer.txt; echo file says $(cat number.txt); exit 4\n```"
        return "Done."

    says = speaker(answer)
    assert await rewards(tokenizer, says, task(tmp_path), max_turns=3) == [0.0, 1.0]
    assert "file says 5291\n[ended with status 4]" in says.prompts[1]


async def test_an_answer_file_takes_the_answer_and_runs_nothing(tokenizer: Any, speaker: Any, tmp_path: Path) -> None:
    data = task(tmp_path, query="?answer_file=/app/answer.txt")
    assert await rewards(tokenizer, speaker(lambda prompt: "1259"), data) == [1.0]
    assert await rewards(tokenizer, speaker(lambda prompt: "echo 1259 > /app/answer.txt"), data) == [0.0]


async def test_a_script_sees_no_tests_and_leaves_no_reward(tokenizer: Any, speaker: Any, tmp_path: Path) -> None:
    cheats = "ls /tests/ > seen.txt; mkdir -p /logs/verifier /tests; echo 1 | tee /logs/verifier/reward.txt /tests/mine"
    found = "[ -s /app/seen.txt ] || [ -e /logs/verifier/reward.txt ] || [ -e /tests/mine ]"
    test = f"{found}; echo $((1 - $?)) > /logs/verifier/reward.txt"
    says = speaker(lambda prompt: f"```\n{cheats}\n```")
    assert await rewards(tokenizer, says, task(tmp_path, test)) == [0.0]


async def test_a_script_that_ends_its_sandbox_earns_nothing(tokenizer: Any, speaker: Any, tmp_path: Path) -> None:
    says = speaker(lambda prompt: "```\nkill -9 $PPID\n```")
    assert await rewards(tokenizer, says, task(tmp_path, "echo 1 > /logs/verifier/reward.txt")) == [0.0]


async def test_rewards_of_json_may_lie_between(tokenizer: Any, speaker: Any, tmp_path: Path) -> None:
    test = 'echo \'{"reward": 0.25, "style": 1}\' > /logs/verifier/reward.json'
    assert await rewards(tokenizer, speaker(lambda prompt: "true"), task(tmp_path, test)) == [0.25]


async def test_tests_that_the_solution_breaks_give_nothing(tokenizer: Any, speaker: Any, tmp_path: Path) -> None:
    test = "source /app/extra.sh 2>/dev/null; echo 1 > /logs/verifier/reward.txt"
    says = speaker(lambda prompt: "```\necho exit > extra.sh\n```")
    assert await rewards(tokenizer, says, task(tmp_path, test)) == [0.0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"test": "curl http://example.invalid/tests"}, r"must write a number to /logs/verifier/reward\.txt"),
        ({"test": "echo many > /logs/verifier/reward.txt"}, "must write a number"),
        ({"dockerfile": "FROM x\nRUN apt-get update"}, "`RUN apt-get update`, which ended with status"),
        ({"dockerfile": "FROM x\nWORKDIR /opt/thing"}, "must lie in /app, .*, got '/opt/thing'"),
        ({"test": "sleep 30", "toml": "[verifier]\ntimeout_sec = 0.5"}, "it did not end in time"),
    ],
)
async def test_a_task_that_cannot_work_here_is_refused_before_anything_is_sampled(
    tokenizer: Any, speaker: Any, tmp_path: Path, changes: dict[str, str], message: str
) -> None:
    says = speaker(lambda prompt: "true")
    with pytest.raises(WorkflowError, match=message):
        await rewards(tokenizer, says, task(tmp_path, **changes))
    assert says.turns == []


async def test_an_episode_that_is_cancelled_ends_its_script(
    tokenizer: Any, speaker: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: queue.SimpleQueue[threading.Thread] = queue.SimpleQueue()
    run_script = harbor._Prepared.run_script

    def seen(*arguments: Any) -> Any:
        begun.put(threading.current_thread())
        return run_script(*arguments)

    monkeypatch.setattr(harbor._Prepared, "run_script", seen)
    says = speaker(lambda prompt: "```\nsleep 600\n```")
    data = task(tmp_path, "echo 0 > /logs/verifier/reward.txt", toml="[agent]\ntimeout_sec = 600")
    episode = asyncio.create_task(rewards(tokenizer, says, data))
    thread = await asyncio.to_thread(begun.get, timeout=100)
    episode.cancel()
    with pytest.raises(asyncio.CancelledError):
        await episode
    await asyncio.to_thread(thread.join, 60)
    assert not thread.is_alive()


async def test_files_that_do_not_fit_are_refused_before_they_are_packed(
    tokenizer: Any, speaker: Any, tmp_path: Path
) -> None:
    data = task(tmp_path)
    os.truncate(tmp_path / "environment" / "number.txt", 1 << 40)
    with pytest.raises(WorkflowError, match=r"must fit into the sandbox's 67108864 bytes, those of .* do not"):
        await rewards(tokenizer, speaker(lambda prompt: "true"), data)


async def test_a_reward_that_is_nested_too_deeply_is_none(tokenizer: Any, speaker: Any, tmp_path: Path) -> None:
    test = """[ -e /app/deep ] && head -c 60000 /dev/zero | tr '\\0' '[' > /logs/verifier/reward.json
    echo 1 > /logs/verifier/reward.txt"""
    says = speaker(lambda prompt: "```\ntouch deep\n```")
    assert await rewards(tokenizer, says, task(tmp_path, test)) == [0.0]


async def test_a_task_of_another_kind_is_refused(tokenizer: Any, speaker: Any) -> None:
    with pytest.raises(WorkflowError, match="needs a task with `harbor`, got the keys 'messages'"):
        await rewards(tokenizer, speaker(lambda prompt: ""), {"messages": []})
