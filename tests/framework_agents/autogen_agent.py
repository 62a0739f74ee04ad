from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.messages import TextMessage
from autogen_core.models import ModelInfo
from autogen_ext.models.openai import OpenAIChatCompletionClient

CAN = ModelInfo(vision=False, function_calling=True, json_output=True, structured_output=True, family="unknown")


async def add(a: int, b: int) -> int:
    """Add two integers."""
    return a + b


class AutogenAgent:
    async def run(self, data, base_url, api_key, http_client):
        model = OpenAIChatCompletionClient(
            model="default", base_url=base_url, api_key=api_key, http_client=http_client, model_info=CAN
        )
        agent = AssistantAgent("solver", model, tools=[add], max_tool_iterations=3)
        result = await agent.run(task=data["messages"][-1]["content"])
        last = result.messages[-1]
        return float(isinstance(last, TextMessage) and last.content == data["answer"])
