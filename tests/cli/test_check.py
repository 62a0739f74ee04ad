"""`areal check` finds the mistakes that episodes make while they are played."""

import contextlib
import importlib
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from areal.cli.main import main

pytestmark = pytest.mark.slow

HEAD = """
import asyncio
import contextlib
import subprocess
import time
import urllib.request
from pathlib import Path
from time import sleep as doze

import aiofiles
from openai import AsyncOpenAI, OpenAI

from areal.api.reward_api import AsyncRewardWrapper
from areal.infra import workflow_context

async def ask(data, keys):
    keys = {key: keys.get(key) for key in ("base_url", "api_key", "http_client")}
    return await AsyncOpenAI(max_retries=0, **keys).chat.completions.create(model="any", messages=data["messages"])
"""

TASK = {"messages": [{"role": "user", "content": "Sort 5291"}], "answer": "1259"}

Write = Callable[[str], Any]
Check = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Write]:
    """Write a module `episodes` and a file with one task into the current directory; gives the module."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "tasks.jsonl").write_text(json.dumps(TASK) + "\n")

    def write(text: str) -> Any:
        (tmp_path / "episodes.py").write_text(HEAD + text)
        importlib.invalidate_caches()
        return importlib.import_module("episodes")

    yield write
    sys.modules.pop("episodes", None)


@pytest.fixture
def check(write: Write, capsys: pytest.CaptureFixture[str]) -> Check:
    """Check the agent of a module against the fake engine; gives the exit code and the report."""

    def check(text: str, *words: str) -> tuple[int, dict[str, Any]]:
        write(text)
        code = main(
            ["check", "episodes.Agent", "--data", "tasks.jsonl", "--engine", "fake", "--n", "4", "--json", *words]
        )
        return code, json.loads(capsys.readouterr().out)

    return check


def agent(body: str) -> str:
    lines = "".join(f"        {line}\n" for line in body.splitlines())
    return f"class Agent:\n    async def run(self, data, **keys):\n{lines}"


def sentences(report: dict[str, Any]) -> list[str]:
    return [f"{each['what']} -> {each['remedy']}" for each in report["findings"]]


def test_a_terminal_shows_what_is_being_played(check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []

    def waiting(text: str) -> contextlib.AbstractContextManager[None]:
        shown.append(text)
        return contextlib.nullcontext()

    monkeypatch.setattr("areal.cli.check.waiting", waiting)
    assert check(GOOD, "--mode", "inline")[0] == 0
    assert shown == ["playing episodes.Agent"]


ASKED = "\nawait ask(data, keys)\nreturn 1.0"
GOOD = agent("answer = await ask(data, keys)\nreturn {answer.id: 1.0}")
"""How an episode ends well."""

BLOCKING = {
    "open('tasks.jsonl').close()": "use async with aiofiles",
    "Path('tasks.jsonl').read_text()": "use async with aiofiles",
    "time.sleep(0.001)": "use await asyncio.sleep",
    "subprocess.run(['true'])": "use await asyncio.create_subprocess_exec",
    "with contextlib.suppress(OSError): urllib.request.urlopen('http://127.0.0.1:9')": "get_aiohttp_session()",
}


def test_calls_that_block_the_event_loop_are_found_by_their_lines_however_short_they_are(check: Check) -> None:
    code, report = check(agent("\n".join(BLOCKING) + ASKED), "--mode", "inline")
    assert code == 1
    first = len(HEAD.splitlines()) + 3
    for number, (line, remedy) in enumerate(BLOCKING.items()):
        finding = report["findings"][number]
        assert finding["what"] == f"{line} blocks the event loop, and with it every other episode"
        assert remedy in finding["remedy"]
        assert finding["where"] == f"episodes.py:{first + number}"
    assert len(report["findings"]) == len(BLOCKING)


def test_line_that_blocks_for_long_is_found_whatever_it_calls(check: Check) -> None:
    _, report = check(agent("doze(0.3)" + ASKED), "--mode", "inline")
    (sentence,) = sentences(report)
    assert sentence.startswith("doze(0.3) blocked the event loop for ")


@pytest.mark.parametrize(
    ("line", "sentences_found"),
    [
        ("ask(data, keys)" + ASKED, ["ask(...) is never awaited, so it never runs -> await ask(...)"]),
        ("asyncio.sleep(1)" + ASKED, ["sleep(...) is never awaited"]),
        ("workflow_context.get_aiohttp_session()" + ASKED, ["get_aiohttp_session(...) is never awaited"]),
        ("return ask(data, keys)", ["(no_interactions)", "ask(...) is never awaited"]),
        ("return float(ask(data, keys))", ["(agent_error)", "ask(...) is never awaited"]),
        ("answer = ask(data, keys)\nreturn answer.id", ["(agent_error)", "ask(...) is never awaited"]),
        (
            "client = AsyncOpenAI()\nx = client.chat.completions.create(model='m', messages=[])\nx.id",
            ["(agent_error)", "AsyncCompletions.create(...) is never awaited"],
        ),
        ("with aiofiles.open('x') as file:\n    pass", ["(agent_error)"]),
    ],
)
def test_coroutine_that_is_never_awaited_is_found(check: Check, line: str, sentences_found: list[str]) -> None:
    code, report = check(agent(line), "--mode", "inline")
    found = sentences(report)
    assert code == 1
    assert len(found) == len(sentences_found), found
    for sentence, each in zip(sentences_found, found, strict=True):
        assert sentence in each


def test_right_code_is_left_alone(check: Check) -> None:
    body = """
await asyncio.gather(ask(data, keys), ask(data, keys))
await asyncio.gather(*[ask(data, keys) for _ in range(3)])
task = asyncio.create_task(ask(data, keys))
await task
later = ask(data, keys)
await later
async with aiofiles.open('tasks.jsonl') as file:
    await file.read()
await asyncio.to_thread(time.sleep, 0.001)
await asyncio.to_thread(lambda: open('tasks.jsonl').close())
process = await asyncio.create_subprocess_exec('true')
await process.wait()
session = await workflow_context.get_aiohttp_session()
with contextlib.suppress(OSError):
    await session.get('http://127.0.0.1:9')
async with asyncio.TaskGroup() as group:
    group.create_task(ask(data, keys))
return 1.0
"""
    code, report = check(agent(body), "--mode", "inline")
    assert (code, report["findings"]) == (0, [])


def test_mistake_in_a_helper_is_named_by_the_helpers_line(check: Check) -> None:
    text = (
        "def load(path):\n    return open(path).read()\n\n"
        "class Agent:\n    async def run(self, data, **keys):\n"
        "        self.score(data)\n        await ask(data, keys)\n        return 1.0\n\n"
        "    def score(self, data):\n        return load('tasks.jsonl')\n"
    )
    _, report = check(text, "--mode", "inline")
    assert [finding["where"] for finding in report["findings"]] == [f"episodes.py:{len(HEAD.splitlines()) + 2}"]


SCORED = """
def reward(data):
    return 1.0

async def async_reward(data):
    return 1.0

class Agent:
    def __init__(self, reward_fn):
        self.score = WRAPPED

    async def run(self, data, **keys):
        await ask(data, keys)
        CALL
        return 1.0
"""


@pytest.mark.parametrize(
    ("wrapped", "call", "sentence"),
    [
        (
            "reward_fn",
            "self.score(data)",
            "self.score(data) runs the reward function in the event loop -> self.score = AsyncRewardWrapper(",
        ),
        ("AsyncRewardWrapper(reward_fn)", "self.score(data)", "AsyncRewardWrapper(...) is never awaited"),
        ("AsyncRewardWrapper(reward_fn)", "await self.score(data)", None),
        ("async_reward", "await self.score(data)", None),
        ("reward_fn", "await asyncio.to_thread(self.score, data)", None),
    ],
)
def test_reward_that_is_not_wrapped_or_not_awaited_is_found(
    check: Check, wrapped: str, call: str, sentence: str | None
) -> None:
    text = SCORED.replace("WRAPPED", wrapped).replace("CALL", call)
    _, report = check(text, "reward_fn=episodes.reward", "--mode", "inline")
    found = sentences(report)
    assert len(found) == (sentence is not None), found
    if sentence:
        assert sentence in found[0]


def test_synchronous_episode_runs_in_a_thread_and_may_block(check: Check) -> None:
    text = (
        "class Agent:\n    def run(self, data, base_url, api_key):\n        time.sleep(0.3)\n"
        "        open('tasks.jsonl').close()\n        client = OpenAI(base_url=base_url, api_key=api_key)\n"
        "        client.chat.completions.create(model='any', messages=data['messages'])\n        return 1.0\n"
    )
    code, report = check(text, "--mode", "inline")
    assert (code, report["findings"]) == (0, [])


def test_good_agent_passes_alone_with_many_and_in_a_process(check: Check) -> None:
    code, report = check(GOOD)
    assert code == 0, report["findings"]
    assert report["passed"] is report["picklable"] is True
    assert [run["name"] for run in report["runs"]] == ["alone", "4 at once", "in a process"]
    for run in report["runs"]:
        assert run["accepted"] == run["episodes"] == run["calls"] == run["completions"] == run["rewarded"]
        assert run["rewards"] == [1.0] * run["episodes"]
        assert run["completion_tokens"] > 0
        assert run["forks"] == 0


def test_rollout_workflow_passes_with_arguments_of_its_constructor(check: Check) -> None:
    code, report = check(
        "from areal.workflow.rlvr import RLVRWorkflow as Agent\n", "reward_fn=areal.reward.exact_match_reward"
    )
    assert code == 0, report["findings"]
    assert report["kind"] == "workflow"
    assert [(run["accepted"], run["calls"]) for run in report["runs"]] == [(1, 1), (4, 4), (1, 1)]


def test_state_that_episodes_share_is_found(check: Check) -> None:
    body = "assert not hasattr(self, 'busy')\nself.busy = 1\nawait ask(data, keys)\ndel self.busy\nreturn 1.0"
    code, report = check(agent(body), "--mode", "inline")
    assert code == 1
    (finding,) = report["findings"]
    assert "4 at once, 3 of 4 rejected (agent_error)" in finding["what"]
    assert "state that episodes share" in finding["remedy"]
    assert "assert not hasattr" in finding["trace"]


@pytest.mark.parametrize(
    ("body", "what", "remedy"),
    [
        ("return 1.0", "(no_interactions)", "extra_kwargs['base_url']"),
        ("await ask(data, keys)\nreturn {'chatcmpl-x': 1.0}", "(reward_error)", "ids of responses"),
        ("await ask(data, keys)\nreturn None", "(filtered)", "return None only"),
    ],
)
def test_episode_that_yields_nothing_is_reported_with_its_remedy(
    check: Check, body: str, what: str, remedy: str
) -> None:
    code, report = check(agent(body), "--mode", "inline")
    assert code == 1
    assert [run["name"] for run in report["runs"]] == ["alone"]
    assert what in report["findings"][0]["what"]
    assert remedy in report["findings"][0]["remedy"]


def test_coroutine_that_many_episodes_drop_is_found_once(check: Check) -> None:
    text = "class Base:\n    async def note(self):\n        return 1\n\n"
    body = "self.note()\nasyncio.sleep(0)\nawait ask(data, keys)\nreturn 1.0"
    code, report = check(text + agent(body).replace("Agent", "Agent(Base)"), "--mode", "inline")
    assert code == 1
    line = len(HEAD.splitlines()) + 7
    assert sorted((finding["where"], finding["what"]) for finding in report["findings"]) == [
        (f"episodes.py:{line}", "Base.note(...) is never awaited, so it never runs"),
        (f"episodes.py:{line + 1}", "sleep(...) is never awaited, so it never runs"),
    ]


def test_calls_of_rejected_episodes_are_counted(check: Check) -> None:
    _, report = check(agent("await ask(data, keys)\nreturn float('nan')"), "--mode", "inline")
    assert (report["runs"][0]["accepted"], report["runs"][0]["calls"]) == (0, 1)


def test_verdict_shows_how_to_train_with_the_same_arguments(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    write(GOOD.replace("    async def", "    def __init__(self, tries):\n        pass\n\n    async def", 1))
    words = "check episodes.Agent tries=3 --data tasks.jsonl --engine fake --n 1 --mode inline"
    assert main(words.split()) == 0
    assert "train(workflow=\"episodes.Agent\", workflow_kwargs={'tries': 3})" in capsys.readouterr().out


def test_forks_are_counted(check: Check) -> None:
    _, report = check(agent("await ask(data, keys)\nawait ask(data, keys)\nreturn 1.0"), "--mode", "inline")
    assert report["runs"][0]["forks"] == 1
    assert (report["runs"][0]["completions"], report["runs"][0]["rewarded"]) == (2, 1)


def test_synchronous_client_that_waits_for_its_own_event_loop_is_cut_off(
    check: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("areal.cli.check.play.STUCK_SECONDS", 0.5)
    body = "client = make()(base_url=keys['base_url'], api_key='DUMMY')\n"
    body += "client.chat.completions.create(model='any', messages=data['messages'])\nreturn 1.0"
    text = f"def make():\n    return OpenAI\n\n{agent(body)}"
    code, report = check(text, "--mode", "inline")
    assert code == 1
    assert "blocked the event loop for longer than" in report["findings"][0]["what"]
    assert report["runs"][0]["stalls"][0]["source"].startswith("client.chat.completions.create")
    code, report = check(text, "--mode", "subproc")
    assert (code, report["findings"], [run["accepted"] for run in report["runs"]]) == (0, [], [4])


def test_agent_that_cannot_be_made_in_a_process_is_reported(check: Check) -> None:
    text = "import os\nHERE = os.environ.pop('ONLY_HERE', None)\n\n" + GOOD.replace(
        "    async def", "    def __init__(self):\n        assert HERE, 'another process'\n\n    async def", 1
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ONLY_HERE", "1")
        code, report = check(text)
    assert (code, report["picklable"]) == (1, False)
    assert "another process" in report["findings"][0]["what"]


def test_report_is_a_table_with_findings_and_remedies(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    write(agent("open('tasks.jsonl').close()\nawait ask(data, keys)\nreturn 1.0"))
    assert main(["check", "episodes.Agent", "--data", "tasks.jsonl", "--engine", "fake", "--mode", "inline"]) == 1
    shown = capsys.readouterr().out
    assert "✓ alone" in shown
    assert "✓ 32 at once" in shown
    assert "open('tasks.jsonl').close() blocks the event loop" in shown
    assert "→ use async with aiofiles.open" in shown
    assert shown.rstrip().endswith("1 finding")


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["nowhere.Agent"], "cannot be imported"),
        (["episodes.Agent", "--data", "no.jsonl"], "cannot read tasks"),
        (["episodes.Agent", "--n", "0"], "--n must be >= 1"),
        (["episodes.Agent", "colour"], "NAME=VALUE"),
    ],
)
def test_nothing_to_check_ends_with_2(
    write: Write, words: list[str], error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write(GOOD)
    assert main(["check", "--engine", "fake", *words]) == 2
    assert error in capsys.readouterr().err


def test_agent_of_the_readme_has_no_finding_in_any_mode(check: Check) -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    (text,) = [block for block in re.findall(r"```python\n(.*?)```", readme, re.DOTALL) if "class MyAgent" in block]
    code, report = check(f"{text}\nAgent = MyAgent\n")
    assert (code, report["findings"]) == (0, [])
    assert report["runs"][-1]["name"] == "in a process"
