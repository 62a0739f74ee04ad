import instructor
from instructor.core import InstructorError
from openai import AsyncOpenAI
from pydantic import BaseModel


class Answer(BaseModel):
    """The answer to the question."""

    value: str


class InstructorAgent:
    async def run(self, data, base_url, api_key, http_client):
        client = instructor.from_openai(AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=http_client))
        try:
            answer = await client.create(Answer, data["messages"], max_retries=1, model="default")
        except InstructorError:
            return 0.0
        return float(answer.value == data["answer"])
