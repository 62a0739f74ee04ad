"""The direct client: the official SDK onto an engine without a network, recorded, rewarded and exported."""

import asyncio
import subprocess
import sys

import openai
import pytest

from areal.api.errors import NoInteractions, RewardInvalid
from areal.config.rollout import GenerationHyperparameters
from areal.proxy import ArealOpenAI

HELLO = {"role": "user", "content": "hello"}


@pytest.fixture
async def direct(engine, tokenizer):
    async with ArealOpenAI(engine, tokenizer, gconfig=GenerationHyperparameters(max_new_tokens=64)) as client:
        yield client


async def converse(client, turns):
    """A conversation of so many turns; gives the ids of its answers."""
    messages, ids = [], []
    for _ in range(turns):
        messages.append(HELLO)
        completion = await client.chat.completions.create(model="any", messages=messages)
        messages.append(completion.choices[0].message.model_dump(exclude_none=True))
        ids.append(completion.id)
    return ids


@pytest.mark.slow
def test_importing_the_proxy_loads_neither_the_sdk_nor_torch():
    code = "import sys, areal.proxy; sys.exit(str(sorted({'openai', 'torch'} & set(sys.modules))))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.stderr.strip() == "[]"


async def test_is_the_official_client_and_answers_without_a_network(direct, tokenizer):
    assert isinstance(direct, openai.AsyncOpenAI)
    completion = await direct.chat.completions.create(model="any", messages=[HELLO])
    assert completion.choices[0].message.content == "1259"
    (node,) = direct.tree.completions
    assert node.id == completion.id
    assert tokenizer.decode(node.output_ids).startswith("1259")


async def test_streams_and_responses_are_recorded_too(direct):
    stream = await direct.chat.completions.create(model="any", messages=[HELLO], stream=True)
    said = [chunk.choices[0].delta.content or "" async for chunk in stream]
    response = await direct.responses.create(model="any", input="hello there")
    assert ("".join(said), response.output_text) == ("1259", "1259")
    assert [node.id for node in direct.tree.completions][1] == response.id


async def test_copy_with_other_options_is_recorded_in_the_same_tree(direct):
    completion = await direct.with_options(timeout=30, max_retries=1).chat.completions.create(
        model="any", messages=[HELLO]
    )
    direct.set_reward(completion.id, 1.0)
    assert direct.tree.reward == 1.0


async def test_last_reward_flows_back_along_the_conversation(direct):
    ids = await converse(direct, 3)
    direct.set_last_reward(1.0)
    assert [each.reward for each in direct.export_interactions().values()] == [0.0, 0.0, 1.0]
    direct.apply_reward_discount(turn_discount=0.9)
    exported = direct.export_interactions()
    assert list(exported) == ids
    assert [each.reward for each in exported.values()] == pytest.approx([0.81, 0.9, 1.0])
    assert [float(each.row.returns.max()) for each in exported.values()] == pytest.approx([0.81, 0.9, 1.0])
    assert [each.given for each in exported.values()] == [0.0, 0.0, 1.0]
    assert [len(each.messages) for each in exported.values()] == [2, 4, 6]


async def test_concat_is_one_row_per_conversation_with_every_reward(direct):
    ids = await converse(direct, 2)
    direct.set_reward(ids[0], 0.5)
    direct.set_reward(ids[1], 1.0)
    ((last, whole),) = direct.export_interactions(style="concat").items()
    assert (last, whole.given, whole.reward) == (ids[1], 1.5, 1.0)
    assert set(whole.row.completion_index[whole.row.loss_mask].tolist()) == {0, 1}
    assert set(whole.row.returns[whole.row.loss_mask].tolist()) == {1.5, 1.0}


async def test_wrong_rewards_and_discounts_are_refused(direct):
    with pytest.raises(NoInteractions):
        direct.set_last_reward(1.0)
    await converse(direct, 1)
    with pytest.raises(RewardInvalid, match="chatcmpl-unknown"):
        direct.set_reward("chatcmpl-unknown", 1.0)
    with pytest.raises(RewardInvalid, match="finite"):
        direct.set_last_reward(float("nan"))
    with pytest.raises(RewardInvalid, match="takes a number"):
        direct.set_last_reward({})
    with pytest.raises(ValueError, match=r"turn_discount must lie in \[0, 1\], got 2"):
        direct.apply_reward_discount(2)
    with pytest.raises(ValueError, match="individual or concat"):
        direct.export_interactions(style="other")


async def test_cancelled_call_aborts_its_generation_and_is_not_recorded(direct, engine):
    engine.hold = asyncio.Event()
    call = asyncio.ensure_future(direct.chat.completions.create(model="any", messages=[HELLO]))
    await engine.until_in_flight(1)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await engine.until_in_flight(0)
    assert direct.tree.completions == []


async def test_closing_refuses_further_calls_and_keeps_what_was_said(direct):
    await converse(direct, 1)
    await direct.close()
    with pytest.raises((openai.APIError, RuntimeError)):
        await direct.chat.completions.create(model="any", messages=[HELLO])
    direct.set_last_reward(1.0)
    assert [each.reward for each in direct.export_interactions().values()] == [1.0]


async def test_positions_must_be_given_if_the_tokenizer_knows_none(engine, tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "model_max_length", int(1e30))
    with pytest.raises(ValueError, match="max_positions must be given"):
        ArealOpenAI(engine, tokenizer)
    client = ArealOpenAI(engine, tokenizer, max_positions=512)
    assert len(await converse(client, 1)) == 1
    await client.close()
