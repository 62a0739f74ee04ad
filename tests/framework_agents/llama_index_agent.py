from llama_index.core.agent.workflow import FunctionAgent
from llama_index.llms.openai_like import OpenAILike


def add(a: int, b: int) -> int:
    """Add two integers."""
    return a + b


class LlamaIndexAgent:
    async def run(self, data, base_url, api_key, http_client):
        model = OpenAILike(
            model="default",
            api_base=base_url,
            api_key=api_key,
            async_http_client=http_client,
            temperature=1.0,
            is_chat_model=True,
            is_function_calling_model=True,
        )
        agent = FunctionAgent(tools=[add], llm=model, early_stopping_method="generate")
        answer = await agent.run(data["messages"][-1]["content"], max_iterations=3)
        return float(str(answer) == data["answer"])
