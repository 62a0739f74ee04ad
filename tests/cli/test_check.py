"""`areal check` finds the mistakes that episodes make, in their source and while they run."""

import importlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from areal.cli.check.source import read_source
from areal.cli.main import main

HEAD = """
import asyncio
import time
from pathlib import Path
from time import sleep as doze

import aiofiles
import openai
from openai import AsyncOpenAI, OpenAI

from areal.api.reward_api import AsyncRewardWrapper
from areal.infra import workflow_context

async def ask(data, keys):
    keys = {key: keys.get(key) for key in ("base_url", "api_key", "http_client")}
    return await AsyncOpenAI(max_retries=0, **keys).chat.completions.create(model="any", messages=data["messages"])
"""

TASK = {"messages": [{"role": "user", "content": "Sort 5291"}], "answer": "1259"}

Write = Callable[[str], Any]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Write]:
    """Write a module `episodes` and a file with one task where the test stands; gives the module."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "tasks.jsonl").write_text(json.dumps(TASK) + "\n")

    def write(text: str) -> Any:
        (tmp_path / "episodes.py").write_text(HEAD + text)
        importlib.invalidate_caches()
        return importlib.import_module("episodes")

    yield write
    sys.modules.pop("episodes", None)


def agent(body: str) -> str:
    lines = "".join(f"        {line}\n" for line in body.splitlines())
    return f"class Agent:\n    async def run(self, data, **keys):\n{lines}"


def sentences(write: Write, text: str) -> list[str]:
    return [f"{each.what} -> {each.remedy}" for each in read_source(write(text).Agent.run)]


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        (
            "open('x').read()",
            "open(...) blocks the event loop, and with it every other episode -> use async with aiofiles",
        ),
        ("Path('x').read_text()", "read_text(...) blocks"),
        (
            "time.sleep(1)",
            "time.sleep(...) blocks the event loop, and with it every other episode -> use await asyncio.sl",
        ),
        ("doze(1)", "doze(...) blocks"),
        ("client = OpenAI()", "OpenAI(...) blocks"),
        ("client = openai.OpenAI()", "openai.OpenAI(...) blocks"),
        ("import requests\nrequests.get('x')", "requests.get(...) blocks"),
        ("import subprocess as s\ns.run(['x'])", "s.run(...) blocks"),
        ("keys['engine'].agenerate(data)", "agenerate(...) is never awaited, so it never runs -> await"),
        ("return ask(data, keys)", "ask(...) is never awaited"),
        ("ask(data, keys)", "ask(...) is never awaited"),
        ("answer = ask(data, keys)\nreturn answer.id", "ask(...) is never awaited"),
        ("return float(ask(data, keys))", "ask(...) is never awaited"),
        ("client = AsyncOpenAI()\nx = client.chat.completions.create(model='m')\nx.id", "create(...) is never awaited"),
        (
            "session = workflow_context.get_aiohttp_session()\nsession.get('x')",
            "get_aiohttp_session(...) is never awaited",
        ),
        ("asyncio.sleep(1)", "asyncio.sleep(...) is never awaited"),
        ("with aiofiles.open('x') as file:\n    pass", "aiofiles.open(...) is asynchronous, `with` is not"),
    ],
)
def test_mistake_is_seen_in_the_source(write: Write, line: str, sentence: str) -> None:
    found = sentences(write, agent(line))
    assert len(found) == 1, found
    assert sentence in found[0]


@pytest.mark.parametrize(
    "line",
    [
        "return await ask(data, keys)",
        "answers = await asyncio.gather(ask(data, keys), ask(data, keys))",
        "answers = await asyncio.gather(*[ask(data, keys) for _ in range(3)])",
        "task = asyncio.create_task(ask(data, keys))\nawait task",
        "later = ask(data, keys)\nanswer = await later\nreturn answer.id",
        "async with aiofiles.open('x') as file:\n    await file.read()",
        "await asyncio.to_thread(time.sleep, 1)",
        "await asyncio.to_thread(lambda: open('x').read())",
        "client = AsyncOpenAI()\nawait client.chat.completions.create(model='m')",
        "session = await workflow_context.get_aiohttp_session()",
        "async with asyncio.TaskGroup() as group:\n    group.create_task(ask(data, keys))",
    ],
)
def test_right_code_is_left_alone(write: Write, line: str) -> None:
    assert sentences(write, agent(line)) == []


def test_mistake_is_followed_into_helpers_and_named_by_its_line(write: Write) -> None:
    module = write(
        "def load(path):\n    return open(path).read()\n\n"
        "class Agent:\n    async def run(self, data):\n        return self.score(data)\n\n"
        "    def score(self, data):\n        return load('x')\n"
    )
    (finding,) = read_source(module.Agent.run)
    assert finding.where == f"episodes.py:{len(HEAD.splitlines()) + 2}"


WORKFLOW = """
class Agent:
    def __init__(self, reward_fn):
        self.score = WRAPPED

    async def arun_episode(self, engine, data):
        return CALL
"""


@pytest.mark.parametrize(
    ("wrapped", "call", "sentence"),
    [
        ("reward_fn", "self.score(data)", "self.score(...) runs the reward function in the event loop -> self.score ="),
        ("AsyncRewardWrapper(reward_fn)", "float(self.score(data))", "self.score(...) is never awaited"),
        ("AsyncRewardWrapper(reward_fn)", "await self.score(data)", None),
        ("reward_fn", "await self.score(data)", None),
        ("reward_fn if ready(reward_fn) else AsyncRewardWrapper(reward_fn)", "await self.score(data)", None),
    ],
)
def test_reward_that_is_not_wrapped_or_not_awaited_is_found(
    write: Write, wrapped: str, call: str, sentence: str | None
) -> None:
    module = write(WORKFLOW.replace("WRAPPED", wrapped).replace("CALL", call))
    found = [f"{each.what} -> {each.remedy}" for each in read_source(module.Agent.arun_episode)]
    assert [sentence in each for each in found if sentence] == ([True] if sentence else [])


def test_synchronous_episode_runs_in_a_thread_and_may_block(write: Write) -> None:
    module = write("class Agent:\n    def run(self, data):\n        time.sleep(1)\n")
    assert read_source(module.Agent.run) == []


Check = Callable[..., tuple[int, dict[str, Any]]]


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


GOOD = agent("answer = await ask(data, keys)\nreturn {answer.id: 1.0}")


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
def test_episode_that_yields_nothing_is_told_with_its_remedy(check: Check, body: str, what: str, remedy: str) -> None:
    code, report = check(agent(body), "--mode", "inline")
    assert code == 1
    assert [run["name"] for run in report["runs"]] == ["alone"]
    assert what in report["findings"][0]["what"]
    assert remedy in report["findings"][0]["remedy"]


def test_coroutine_that_only_the_run_shows_to_be_dropped_is_found_once(check: Check) -> None:
    text = "class Base:\n    async def note(self):\n        return 1\n\n"
    body = "self.note()\nasyncio.sleep(0)\nawait ask(data, keys)\nreturn 1.0"
    code, report = check(text + agent(body).replace("Agent", "Agent(Base)"), "--mode", "inline")
    assert code == 1
    line = len(HEAD.splitlines()) + 7
    assert sorted((finding["where"], finding["what"]) for finding in report["findings"]) == [
        (f"episodes.py:{line}", "Base.note(...) is never awaited, so it never runs"),
        (f"episodes.py:{line + 1}", "asyncio.sleep(...) is never awaited, so it never runs"),
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


def test_agent_that_cannot_be_made_in_a_process_is_told(check: Check) -> None:
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
    assert "open(...) blocks the event loop" in shown
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
