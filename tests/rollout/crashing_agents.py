"""Agents for processes of their own: importable there, each with its own way to end."""

import os
import threading

import openai
from sdk_call import chat

from areal.api.reward_api import AsyncRewardWrapper
from areal.infra import workflow_context
from areal.utils import stats_tracker


class Telling:
    """Says by its statistics what it was given and how often its class was made in this process."""

    made = 0

    def __init__(self):
        type(self).made += 1

    async def run(self, data, **extra_kwargs):
        completion = await chat(extra_kwargs, data["messages"])
        context = workflow_context.get()
        stats = stats_tracker.get(workflow_context.stat_scope())
        stats.scalar(made=self.made, pid=os.getpid(), task_id=context.task_id, given=len(extra_kwargs))
        stats.scalar(http_client="http_client" in extra_kwargs or context.http_client is not None)
        for value in (1, 3):
            stats.scalar(tries=value)
        return float(completion.choices[0].message.content == data["answer"])


class Synchronous:
    """A synchronous client without arguments: the environment says where the model is."""

    async def run(self, data):
        with openai.OpenAI(max_retries=0) as client:
            completion = client.chat.completions.create(model="any", messages=data["messages"])
        return float(completion.choices[0].message.content == data["answer"])


class Keyless:
    """Passes a key of its own, as a guide's sample does."""

    def run(self, data, base_url):
        with openai.OpenAI(base_url=base_url, api_key="DUMMY", max_retries=0) as client:
            client.chat.completions.create(model="any", messages=data["messages"])
        return 0.75


class Claude:
    """The other SDK, without arguments too."""

    def run(self, data):
        import anthropic

        with anthropic.Anthropic(max_retries=0) as client:
            client.messages.create(model="any", max_tokens=32, messages=data["messages"])
        return 0.25


class Obedient:
    """Ends as its task says."""

    async def run(self, data, **extra_kwargs):
        if data.get("end") == "hang":
            threading.Event().wait()
        completion = await chat(extra_kwargs, data["messages"])
        match data.get("end"):
            case "crash":
                os._exit(3)
            case "raise":
                return {}["no such tool"]
            case "exit":
                raise SystemExit("done")
            case "reward":
                return await AsyncRewardWrapper(broken)()
            case "dict":
                return {completion.id: 0.5}
            case "none":
                return None
            case "text":
                return "good"
        return 1.0


async def broken():
    raise ZeroDivisionError("no digits")


class Unmakeable:
    def __init__(self):
        raise OSError("no index here")

    async def run(self, data):
        return 1.0


class Equipped:
    """Its constructor's arguments come from the config."""

    def __init__(self, tokenizer, gconfig, factor):
        self.reward = factor * gconfig.max_new_tokens + len(tokenizer.encode("1259"))

    async def run(self, data, **extra_kwargs):
        await chat(extra_kwargs, data["messages"])
        return float(self.reward)
