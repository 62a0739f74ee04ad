from google.adk.agents import LlmAgent, RunConfig
from google.adk.agents.invocation_context import LlmCallsLimitExceededError
from google.adk.models.lite_llm import LiteLlm
from google.adk.runners import InMemoryRunner
from google.genai.types import UserContent


def add(a: int, b: int) -> int:
    """Add two integers."""
    return a + b


class GoogleAdkAgent:
    async def run(self, data, base_url, api_key):
        model = LiteLlm("openai/default", api_base=base_url, api_key=api_key)
        runner = InMemoryRunner(LlmAgent(name="solver", model=model, tools=[add]))
        session = await runner.session_service.create_session(app_name=runner.app_name, user_id="user")
        turn = {"new_message": UserContent(data["messages"][-1]["content"]), "run_config": RunConfig(max_llm_calls=3)}
        said = ""
        try:
            async for event in runner.run_async(user_id="user", session_id=session.id, **turn):
                if event.is_final_response() and event.content:
                    said = "".join(part.text or "" for part in event.content.parts)
        except (LlmCallsLimitExceededError, ValueError):
            return 0.0
        return float(said == data["answer"])
