"""What frameworks do beyond one answer, with the real libraries: streams, typed answers, the other APIs they speak."""

from typing import Any

import pytest
from agent_stage import Stage
from calculator_task import CALL, SUM, use_the_calculator
from pydantic import BaseModel

from areal.workflow.math_task import CALCULATOR, MODEL, add, openai_client

QUESTION = SUM["messages"][0]["content"]
APIS = ["chat", "responses"]


class Answer(BaseModel):
    """The answer to a sum."""

    value: int


def answer_by_tool(name: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {{"value": 7}}}}\n</tool_call>'


def agents_model(sdk: Any, stage: Stage, api: str) -> Any:
    kind = sdk.OpenAIChatCompletionsModel if api == "chat" else sdk.OpenAIResponsesModel
    return kind(model=MODEL, openai_client=openai_client(stage.kwargs()))


def pydantic_ai_model(stage: Stage, api: str) -> Any:
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    kind: Any = OpenAIChatModel if api == "chat" else OpenAIResponsesModel
    return kind(MODEL, provider=OpenAIProvider(openai_client=openai_client(stage.kwargs())))


def chat_openai(stage: Stage, api: str) -> Any:
    from langchain_openai import ChatOpenAI

    given = stage.kwargs()
    return ChatOpenAI(
        model=MODEL,
        base_url=given["base_url"],
        api_key=given["api_key"],
        http_async_client=given["http_client"],
        use_responses_api=api == "responses",
    )


def anthropic_client(stage: Stage) -> Any:
    from anthropic import AsyncAnthropic

    given = stage.kwargs()
    base_url = given["base_url"].removesuffix("/v1")
    return AsyncAnthropic(base_url=base_url, api_key=given["api_key"], http_client=given["httpx2_client"])


@pytest.mark.parametrize("api", APIS)
async def test_openai_agents_streams_a_tool_loop(stage: Any, api: str) -> None:
    sdk = pytest.importorskip("agents")
    async with stage(use_the_calculator) as s:
        agent = sdk.Agent(name="a", model=agents_model(sdk, s, api), tools=[sdk.function_tool(add)])
        run = sdk.Runner.run_streamed(agent, QUESTION, run_config=sdk.RunConfig(tracing_disabled=True))
        raw = [event.data async for event in run.stream_events() if event.type == "raw_response_event"]
        text = "".join(data.delta for data in raw if data.type == "response.output_text.delta")
        assert (run.final_output, text) == ("It is 7.", "It is 7.")
        s.check_one_conversation(2)
        s.check_tokens()


@pytest.mark.parametrize("api", APIS)
async def test_openai_agents_reads_a_typed_answer(stage: Any, api: str) -> None:
    sdk = pytest.importorskip("agents")
    async with stage(lambda prompt: '{"value":7}') as s:
        agent = sdk.Agent(name="a", model=agents_model(sdk, s, api), output_type=Answer)
        result = await sdk.Runner.run(agent, QUESTION, run_config=sdk.RunConfig(tracing_disabled=True))
        assert result.final_output == Answer(value=7)
        s.check_tokens()


async def test_openai_agents_continues_what_the_server_remembers(stage: Any) -> None:
    sdk = pytest.importorskip("agents")
    config = sdk.RunConfig(tracing_disabled=True)
    async with stage(lambda prompt: "8" if "again" not in prompt else "7") as s:
        agent = sdk.Agent(name="a", model=agents_model(sdk, s, "responses"))
        first = await sdk.Runner.run(agent, QUESTION, run_config=config)
        second = await sdk.Runner.run(
            agent, "Try again.", previous_response_id=first.last_response_id, run_config=config
        )
        assert second.final_output == "7"
        s.check_one_conversation(2)
        s.check_tokens()


async def test_openai_agents_hands_over_between_agents(stage: Any) -> None:
    sdk = pytest.importorskip("agents")

    def answer(prompt: str) -> str:
        handed = "<|im_start|>tool" in prompt
        return "7" if handed else '<tool_call>\n{"name": "transfer_to_adder", "arguments": {}}\n</tool_call>'

    async with stage(answer) as s:
        model = agents_model(sdk, s, "responses")
        adder = sdk.Agent(name="adder", model=model, instructions="You add.")
        desk = sdk.Agent(name="desk", model=model, handoffs=[adder])
        result = await sdk.Runner.run(desk, QUESTION, run_config=sdk.RunConfig(tracing_disabled=True))
        assert (result.final_output, result.last_agent.name) == ("7", "adder")
        assert "You add." in s.speaker.prompts[1]
        s.check_tokens()


@pytest.mark.parametrize("api", APIS)
async def test_langchain_streams_and_continues(stage: Any, api: str) -> None:
    pytest.importorskip("langchain_openai")
    async with stage(lambda prompt: "It is 7." if "again" in prompt else "It is 8.") as s:
        model = chat_openai(s, api)
        whole = None
        async for chunk in model.astream(SUM["messages"]):
            whole = chunk if whole is None else whole + chunk
        assert whole is not None
        assert whole.text == "It is 8."
        last = await model.ainvoke([*SUM["messages"], whole, {"role": "user", "content": "Try again."}])
        assert last.text == "It is 7."
        s.check_one_conversation(2)
        s.check_tokens()


@pytest.mark.parametrize(
    ("method", "said"), [("json_schema", '{"value":7}'), ("function_calling", answer_by_tool("Answer"))]
)
async def test_langchain_reads_a_typed_answer(stage: Any, method: str, said: str) -> None:
    pytest.importorskip("langchain_openai")
    async with stage(lambda prompt: said) as s:
        model = chat_openai(s, "chat").with_structured_output(Answer, method=method)
        assert await model.ainvoke(SUM["messages"]) == Answer(value=7)
        s.check_tokens()


@pytest.mark.parametrize("api", APIS)
async def test_langgraph_prebuilt_agent_streams_its_tool_loop(stage: Any, api: str) -> None:
    agents = pytest.importorskip("langchain.agents")
    async with stage(use_the_calculator) as s:
        agent = agents.create_agent(chat_openai(s, api), tools=[*CALCULATOR])
        parts = [part async for part, _ in agent.astream({"messages": SUM["messages"]}, stream_mode="messages")]
        assert "".join(part.text for part in parts if part.type == "AIMessageChunk") == "It is 7."
        s.check_one_conversation(2)
        s.check_tokens()


async def test_anthropic_streams_a_tool_loop(stage: Any) -> None:
    pytest.importorskip("anthropic")
    from areal.workflow.anthropic.math_agent import TOOLS

    async with stage(use_the_calculator) as s:
        client = anthropic_client(s)
        messages: list[Any] = list(SUM["messages"])
        asked = {"model": MODEL, "max_tokens": 256, "tools": TOOLS}
        async with client.messages.stream(**asked, messages=messages) as stream:
            called = await stream.get_final_message()
        (use,) = called.content
        assert (called.stop_reason, use.name, use.input) == ("tool_use", "add", {"a": 3, "b": 4})
        result = {"type": "tool_result", "tool_use_id": use.id, "content": [{"type": "text", "text": "7"}]}
        messages += [{"role": "assistant", "content": called.content}, {"role": "user", "content": [result]}]
        async with client.messages.stream(**asked, messages=messages) as stream:
            assert "".join([text async for text in stream.text_stream]) == "It is 7."
        s.check_one_conversation(2)
        s.check_tokens()


async def test_anthropic_tool_runner_drives_the_loop(stage: Any) -> None:
    anthropic = pytest.importorskip("anthropic")
    async with stage(use_the_calculator) as s:
        runner = anthropic_client(s).beta.messages.tool_runner(
            model=MODEL, max_tokens=256, messages=SUM["messages"], tools=[anthropic.beta_async_tool(add)]
        )
        final = await runner.until_done()
        assert final.content[0].text == "It is 7."
        s.check_one_conversation(2)
        s.check_tokens()


async def test_anthropic_model_must_call_the_tool_it_is_told_to(stage: Any) -> None:
    pytest.importorskip("anthropic")
    from areal.workflow.anthropic.math_agent import TOOLS

    async with stage(lambda prompt: CALL) as s:
        message = await anthropic_client(s).messages.create(
            model=MODEL,
            max_tokens=256,
            messages=SUM["messages"],
            tools=TOOLS,
            tool_choice={"type": "tool", "name": "add"},
        )
        assert message.content[0].input == {"a": 3, "b": 4}
        s.check_tokens()


@pytest.mark.parametrize("api", APIS)
async def test_pydantic_ai_streams_a_tool_loop(stage: Any, api: str) -> None:
    sdk = pytest.importorskip("pydantic_ai")
    async with stage(use_the_calculator) as s:
        agent = sdk.Agent(pydantic_ai_model(s, api), tools=CALCULATOR)
        async with agent.run_stream(QUESTION) as run:
            assert "".join([text async for text in run.stream_text(delta=True)]) == "It is 7."
        s.check_one_conversation(2)
        s.check_tokens()


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize(("mode", "said"), [("Tool", answer_by_tool("final_result")), ("Native", '{"value":7}')])
async def test_pydantic_ai_reads_a_typed_answer(stage: Any, api: str, mode: str, said: str) -> None:
    sdk = pytest.importorskip("pydantic_ai")
    async with stage(lambda prompt: said) as s:
        agent = sdk.Agent(pydantic_ai_model(s, api), output_type=getattr(sdk, f"{mode}Output")(Answer))
        assert (await agent.run(QUESTION)).output == Answer(value=7)
        s.check_tokens()


async def test_pydantic_ai_asks_again_for_an_answer_of_the_wrong_type(stage: Any) -> None:
    sdk = pytest.importorskip("pydantic_ai")
    right, wrong = answer_by_tool("final_result"), answer_by_tool("final_result").replace("7", '"x"')
    async with stage(lambda prompt: right if "<|im_start|>tool" in prompt else wrong, constrained=False) as s:
        agent = sdk.Agent(pydantic_ai_model(s, "chat"), output_type=Answer)
        assert (await agent.run(QUESTION)).output == Answer(value=7)
        s.check_one_conversation(2)
        s.check_tokens()


async def test_camel_streams_a_tool_loop(stage: Any) -> None:
    agents = pytest.importorskip("camel.agents")
    from areal.workflow.camel.math_agent import chat_model

    async with stage(use_the_calculator) as s:
        model = chat_model(s.kwargs(), stream=True)
        agent = agents.ChatAgent(model=model, tools=[*CALCULATOR], stream_accumulate=False)
        texts = [part.msgs[0].content async for part in await agent.astep(QUESTION) if part.msgs]
        assert "".join(texts).endswith("It is 7.")
        s.check_one_conversation(2)
        s.check_tokens()


async def test_camel_reads_a_typed_answer(stage: Any) -> None:
    agents = pytest.importorskip("camel.agents")
    from areal.workflow.camel.math_agent import chat_model

    async with stage(lambda prompt: '{"value":7}') as s:
        response = await agents.ChatAgent(model=chat_model(s.kwargs())).astep(QUESTION, response_format=Answer)
        assert response.msgs[0].parsed == Answer(value=7)
        s.check_tokens()
