from crewai import LLM, Agent
from crewai.tools import tool


@tool
def add(a: int, b: int) -> int:
    """Add two integers."""
    return a + b


class CrewaiAgent:
    async def run(self, data, base_url, api_key):
        model = LLM("openai/default", base_url=base_url, api_key=api_key)
        agent = Agent(role="solver", goal="Solve.", backstory="You solve.", llm=model, tools=[add], max_iter=3)
        result = await agent.kickoff_async(data["messages"][-1]["content"])
        return float(result.raw == data["answer"])
