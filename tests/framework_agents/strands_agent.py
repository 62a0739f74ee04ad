from openai import AsyncOpenAI
from strands import Agent, tool
from strands.models.openai import OpenAIModel
from strands.types.exceptions import MaxTokensReachedException


@tool
def add(a: int, b: int) -> int:
    """Add two integers."""
    return a + b


class StrandsAgent:
    async def run(self, data, base_url, api_key, http_client):
        client = AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=http_client)
        agent = Agent(OpenAIModel(client, model_id="default"), tools=[add], callback_handler=None)
        try:
            result = await agent.invoke_async(data["messages"][-1]["content"], limits={"turns": 3})
        except MaxTokensReachedException:
            return 0.0
        return float(str(result).strip() == data["answer"])
