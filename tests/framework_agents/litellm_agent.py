import litellm
from openai import AsyncOpenAI


class LitellmAgent:
    async def run(self, data, base_url, api_key, http_client):
        client = AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=http_client)
        answer = await litellm.acompletion("openai/default", data["messages"], client=client)
        return {answer.id: float(answer.choices[0].message.content == data["answer"])}
