import asyncio

from smolagents import LogLevel, OpenAIModel, ToolCallingAgent, tool


@tool
def add(a: int, b: int) -> int:
    """Add two integers.

    Args:
        a: the first
        b: the second
    """
    return a + b


class SmolagentsAgent:
    async def run(self, data, base_url, api_key):
        model = OpenAIModel("default", api_base=base_url, api_key=api_key)
        agent = ToolCallingAgent([add], model, max_steps=3, verbosity_level=LogLevel.OFF)
        answer = await asyncio.to_thread(agent.run, data["messages"][-1]["content"])
        return float(str(answer) == data["answer"])
