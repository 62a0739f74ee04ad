"""Environments of the real openenv library as conversations, in this process and on a server of the library."""

import asyncio
import json
import re
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from areal.api.errors import ArealError, WorkflowError
from areal.config.rollout import GenerationHyperparameters
from areal.workflow import openenv
from areal.workflow.gymnasium_text import NOT_AN_ACTION
from areal.workflow.openenv import OpenEnvWorkflow

core = pytest.importorskip("openenv.core")
pytestmark = pytest.mark.slow  # the library takes seconds to load

SORTING = "examples.openenv_environment.sorting_rounds:SortingRounds"
GCONFIG = GenerationHyperparameters(max_new_tokens=32)


@pytest.fixture(autouse=True)
def root_is_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(Path(__file__).parents[2]), *sys.path])


@pytest.fixture
async def server() -> AsyncIterator[str]:
    """The address of the library's server with the example. Its socket listens before the server does."""
    import uvicorn

    from examples.openenv_environment import sorting_rounds as example

    app = core.create_fastapi_app(
        example.SortingRounds, example.SortAction, example.SortObservation, max_concurrent_envs=4
    )
    with socket.create_server(("127.0.0.1", 0)) as listening:
        served = uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=1))
        task = asyncio.create_task(served.serve(sockets=[listening]))
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        served.should_exit = True
        await asyncio.wait_for(task, 30)


SCHEMA = {"action": {"properties": {"text": {"type": "string"}}, "required": ["text"]}}


@pytest.fixture
async def hostile() -> AsyncIterator[Any]:
    """`await hostile(schema, *answers)`: the address of a server that says these things, and then what its last says:
    text is sent as it is, anything else as JSON, None ends the connection, and ... answers nothing any more."""
    import uvicorn
    from starlette.applications import Starlette
    from starlette.responses import JSONResponse
    from starlette.routing import Route, WebSocketRoute

    async with AsyncExitStack() as started:

        async def start(schema: Any, *answers: Any) -> str:
            async def talk(visitor: Any) -> None:
                await visitor.accept()
                for answer in answers:
                    await visitor.receive_text()
                    if answer is ...:
                        break
                    if answer is None:
                        return await visitor.close()
                    await visitor.send_text(answer if isinstance(answer, str) else json.dumps(answer))
                while True:
                    await visitor.receive_text()

            async def described(request: Any) -> JSONResponse:
                return JSONResponse(schema)

            app = Starlette(routes=[Route("/schema", described), WebSocketRoute("/ws", talk)])
            listening = started.enter_context(socket.create_server(("127.0.0.1", 0)))
            served = uvicorn.Server(uvicorn.Config(app, log_level="critical", timeout_graceful_shutdown=1))
            task = asyncio.create_task(served.serve(sockets=[listening]))

            async def end() -> None:
                served.should_exit = True
                await asyncio.wait_for(task, 30)

            started.push_async_callback(end)
            return f"http://127.0.0.1:{listening.getsockname()[1]}"

        yield start


def observed(reward: Any = None, *, done: bool = False, observation: Any = "seen") -> dict[str, Any]:
    shown = {"text": observation} if isinstance(observation, str) else observation
    return {"type": "observation", "data": {"observation": shown, "reward": reward, "done": done}}


class NumberAction(core.Action):
    number: int
    note: str = ""


class TwoTexts(core.Observation):
    left: str = "L"
    right: str = "R"


class Numbers(core.Environment[NumberAction, TwoTexts, core.State]):
    """One step, whose reward is the number."""

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> TwoTexts:
        return TwoTexts(right=str(kwargs.get("word", "R")))

    def step(self, action: NumberAction, timeout_s: float | None = None, **kwargs: Any) -> TwoTexts:
        return TwoTexts(reward=action.number, done=True)

    @property
    def state(self) -> Any:
        return core.State()


NUMBERS = f"{__name__}:Numbers"


def workflow(tokenizer: Any, **settings: Any) -> OpenEnvWorkflow:
    return OpenEnvWorkflow(GCONFIG, tokenizer, **settings)


def sorts(prompt: str) -> str:
    return "".join(sorted(re.findall(r"Sort (\d+)", prompt)[-1]))


async def test_each_step_shows_its_observation_and_pays_its_completion(tokenizer: Any, speaker: Any) -> None:
    says = speaker(sorts)
    rows = await workflow(tokenizer, env=SORTING).arun_episode(says.engine(), {"seed": 3})
    assert [prompt.count("Sort ") for prompt in says.prompts] == [1, 2, 3]
    assert says.prompts[1].startswith(says.prompts[0] + sorts(says.prompts[0]))
    assert rows["rewards"].tolist() == [1.0, 1.0, 1.0]


async def test_a_server_plays_the_same_episode(tokenizer: Any, speaker: Any, server: str) -> None:
    played = []
    for env in (SORTING, server):
        says = speaker(sorts)
        rows = await workflow(tokenizer).arun_episode(says.engine(), {"env": env, "seed": 3})
        played.append((says.prompts, rows["rewards"].tolist()))
    assert played[0] == played[1]


async def test_an_answer_that_is_no_action_costs_a_turn_and_no_step(tokenizer: Any, speaker: Any) -> None:
    says = speaker(lambda prompt: "7" if NOT_AN_ACTION in prompt else "seven")
    rows = await workflow(tokenizer, env=NUMBERS).arun_episode(says.engine(), {"options": {"word": "W"}})
    assert '{"left": "L", "right": "W"}' in says.prompts[0]
    assert rows["rewards"].tolist() == [0.0, 7.0]


@pytest.mark.parametrize(
    ("schema", "answers", "message"),
    [
        ([], [], "there is no OpenEnv server at"),
        ({"action": "text"}, [], "there is no OpenEnv server at"),
        ({"action": {"properties": 3}}, [], "its actions have no properties"),
        (SCHEMA, [None], "failed in reset"),
        (SCHEMA, ["<html>"], "failed in reset"),
        (SCHEMA, ["[]"], "failed in reset"),
        (SCHEMA, [{"type": "error", "data": {"message": "full", "code": "CAPACITY"}}], "failed in reset: .*CAPACITY"),
        (SCHEMA, [observed(observation=[1])], r"an observation of .* must be an object, got \[1\]"),
        (SCHEMA, [observed(), None], "failed in step"),
        (SCHEMA, [observed(), observed("many")], "a reward must be a finite number, got str 'many' from http"),
        (SCHEMA, [observed(), observed(float("nan"))], "a reward must be a finite number, got float nan from http"),
        (SCHEMA, [observed(), ...], "step of the environment must end within step_seconds"),
    ],
)
async def test_a_server_that_makes_no_sense_fails_in_one_line(
    tokenizer: Any, speaker: Any, hostile: Any, schema: Any, answers: list[Any], message: str
) -> None:
    url = await hostile(schema, *answers)
    with pytest.raises(ArealError, match=message) as caught:
        await workflow(tokenizer, env=url, step_seconds=2).arun_episode(speaker(lambda prompt: "7").engine(), {})
    assert "\n" not in str(caught.value)


async def test_a_session_that_cannot_be_closed_costs_no_episode(
    tokenizer: Any, speaker: Any, hostile: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def hangs(self: Any) -> None:
        await asyncio.get_running_loop().create_future()

    monkeypatch.setattr(core.GenericEnvClient, "close", hangs)
    monkeypatch.setattr(openenv, "CLOSE_SECONDS", 0.01)
    url = await hostile(SCHEMA, observed(), observed(0.5, done=True))
    rows = await workflow(tokenizer, env=url).arun_episode(speaker(lambda prompt: "7").engine(), {})
    assert rows["rewards"].tolist() == [0.5]


async def test_fields_can_be_chosen(tokenizer: Any, speaker: Any) -> None:
    says = speaker(lambda prompt: "5")
    settings = {"env": NUMBERS, "observation_field": "right", "action_field": "number"}
    await workflow(tokenizer, **settings).arun_episode(says.engine(), {})
    assert "user\nR<" in says.prompts[0]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "there is no environment"),
        ({"env": "nowhere:Nothing"}, "must be module:Class of an OpenEnv Environment"),
        ({"env": "pathlib:Path"}, "must be an OpenEnv Environment"),
        ({"env": SORTING, "env_kwargs": {"colour": 1}}, "with {'colour': 1}"),
        ({"env": SORTING, "action_field": "letters"}, "has no field 'letters'; it has digits"),
        ({"env": SORTING, "observation_field": "image"}, "has no field 'image'; it has text"),
        ({"env": "http://127.0.0.1:9"}, "there is no OpenEnv server at http://127.0.0.1:9"),
    ],
)
async def test_what_is_no_environment_is_refused(
    tokenizer: Any, speaker: Any, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(WorkflowError, match=message):
        await workflow(tokenizer, **settings).arun_episode(speaker(sorts).engine(), {})
