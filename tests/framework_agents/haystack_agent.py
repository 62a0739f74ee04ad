from typing import Annotated

from haystack.components.agents import Agent
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.tools import tool
from haystack.utils import Secret


@tool
def add(a: Annotated[int, "the first"], b: Annotated[int, "the second"]) -> int:
    """Add two integers."""
    return a + b


class HaystackAgent:
    async def run(self, data, base_url, api_key):
        model = OpenAIChatGenerator(Secret.from_token(api_key), "default", api_base_url=base_url)
        agent = Agent(chat_generator=model, tools=[add], max_agent_steps=3)
        result = await agent.run_async([ChatMessage.from_user(data["messages"][-1]["content"])])
        return float(result["last_message"].text == data["answer"])
