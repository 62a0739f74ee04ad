"""Answers that another engine began, on every engine: it goes on from the tokens that were drawn before."""

import asyncio
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import pytest
from engine_kinds import LONG, Engines, answer, ask, soon, until
from tiny_models import byte_tokenizer

from areal.api.engine_api import InferenceEngine
from areal.api.errors import DrawnRefused, RequestError, WeightMismatch
from areal.api.io_struct import Grammar, ModelResponse, TokenChunk

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

DIGITS = Grammar("lark", "start: /[0-9]{9}/")


def beginning(response: ModelResponse, count: int) -> TokenChunk:
    """Its first tokens, as they came out of a stream."""
    versions = response.output_versions[:count]
    return TokenChunk(
        tokens=response.output_tokens[:count],
        logprobs=response.output_logprobs[:count],
        versions=versions,
        digests={version: response.digests[version] for version in versions},
        sets=[] if response.choices is None else response.choices.sets()[:count],
    )


async def resumed(engine: InferenceEngine, drawn: TokenChunk, **settings: Any) -> ModelResponse:
    return await soon(engine.agenerate(replace(ask(**settings), drawn=drawn)))


@pytest.mark.parametrize("settings", [{"greedy": True}, {"seed": 5}, {"seed": 5, "temperature": 0.7, "top_p": 0.9}])
async def test_resumed_answer_is_the_uninterrupted_one(engine: InferenceEngine, settings: dict[str, Any]) -> None:
    whole = await answer(engine, max_new_tokens=30, **settings)
    for count in (0, 1, 17, 29):
        again = await resumed(engine, beginning(whole, count), max_new_tokens=30, **settings)
        assert again.output_tokens == whole.output_tokens
        assert again.output_logprobs == pytest.approx(whole.output_logprobs, abs=1e-4)
        assert (again.input_tokens, again.stop_reason) == (whole.input_tokens, "length")
        sets = [[] if each.choices is None else each.choices.sets() for each in (again, whole)]
        assert [left.tolist() for left in sets[0]] == [left.tolist() for left in sets[1]]
        assert len(sets[1]) == 30 * ("top_p" in settings)


async def test_drawn_tokens_without_what_top_p_left_are_refused(engine: InferenceEngine) -> None:
    whole = await answer(engine, max_new_tokens=8, seed=5, top_p=0.9)
    with pytest.raises(RequestError, match="what top_p and top_k left for each of 3 tokens, got 0"):
        await resumed(engine, replace(beginning(whole, 3), sets=[]), max_new_tokens=8, seed=5, top_p=0.9)


async def test_drawn_tokens_come_back_unchanged(engines: Engines, engine: InferenceEngine) -> None:
    await engine.update_weights(update := engines.publish())
    drawn = TokenChunk(tokens=[7, 8, 9], logprobs=[-1.5, -2.5, -3.5], versions=[-8, -8, -7], digests={-8: "a", -7: "b"})
    response = await resumed(engine, drawn, max_new_tokens=6, seed=1)
    assert response.output_tokens[:3] == [7, 8, 9]
    assert response.output_logprobs[:3] == [-1.5, -2.5, -3.5]
    assert response.output_versions == [-8, -8, -7, *[update.version] * 3]
    assert response.digests == {-8: "a", -7: "b", update.version: update.digest}


async def test_stream_of_a_resumed_answer_begins_after_the_drawn_tokens(engine: InferenceEngine) -> None:
    whole = await answer(engine, seed=3, max_new_tokens=20)
    request = replace(ask(seed=3, max_new_tokens=20), drawn=beginning(whole, 8))
    async with asyncio.timeout(60), aclosing(engine.astream(request)) as chunks:
        parts = [chunk async for chunk in chunks]
    assert [token for part in parts for token in part.tokens] == whole.output_tokens[8:]
    assert parts[-1].response is not None
    assert parts[-1].response.output_tokens == whole.output_tokens


async def test_answer_that_was_complete_is_given_without_another_token(engine: InferenceEngine) -> None:
    full = await answer(engine, seed=4)
    assert (await resumed(engine, beginning(full, 12), seed=4)).output_tokens == full.output_tokens
    stop = full.output_tokens[5]
    stopped = await answer(engine, seed=4, stop_token_ids=[stop])
    again = await resumed(engine, beginning(stopped, stopped.output_len), seed=4, stop_token_ids=[stop])
    assert (again.output_tokens, again.stop_reason) == (stopped.output_tokens, "stop")
    request = replace(ask(seed=4), drawn=beginning(full, 12))
    async with asyncio.timeout(60), aclosing(engine.astream(request)) as chunks:
        (only,) = [chunk async for chunk in chunks]
    assert only.tokens == []
    assert only.response is not None
    await until(engine, running=0, waiting=0)


async def test_stop_text_that_began_in_the_drawn_tokens_ends_the_answer(engine: InferenceEngine) -> None:
    tokenizer = byte_tokenizer()
    free = await answer(engine, seed=4, max_new_tokens=300)
    texts = [tokenizer.decode(token) for token in free.output_tokens]
    place = next(i for i in range(3, 299) if all(text.isascii() and text.isprintable() for text in texts[i : i + 2]))
    settings: dict[str, Any] = {"seed": 4, "max_new_tokens": 300, "stop": ["".join(texts[place : place + 2])]}
    whole = await answer(engine, **settings)
    again = await resumed(engine, beginning(whole, whole.output_len - 1), **settings)
    assert (again.output_tokens, again.stop_reason) == (whole.output_tokens, "stop")


async def test_drawn_tokens_count_for_min_new_tokens(engine: InferenceEngine) -> None:
    free = await answer(engine, seed=4)
    settings: dict[str, Any] = {"seed": 4, "min_new_tokens": 6, "stop_token_ids": free.output_tokens[:3]}
    whole = await answer(engine, **settings)
    again = await resumed(engine, beginning(whole, 5), **settings)
    assert (again.output_tokens, again.stop_reason) == (whole.output_tokens, whole.stop_reason)


async def test_grammar_goes_on_from_the_drawn_tokens(engine: InferenceEngine) -> None:
    request = replace(ask(seed=2, max_new_tokens=20), grammar=DIGITS)
    whole = await soon(engine.agenerate(request))
    assert whole.stop_reason == "stop"
    again = await soon(engine.agenerate(replace(request, drawn=beginning(whole, 4))))
    assert (again.output_tokens, again.stop_reason) == (whole.output_tokens, "stop")


async def test_drawn_tokens_that_the_grammar_does_not_take_are_refused(engine: InferenceEngine) -> None:
    request = replace(ask(seed=2, max_new_tokens=20), grammar=DIGITS)
    letters = byte_tokenizer().encode("no")
    drawn = TokenChunk(letters, [-1.0] * len(letters), [-5] * len(letters), digests={-5: "a"})
    with pytest.raises(DrawnRefused, match="breaks the grammar"):
        await soon(engine.agenerate(replace(request, drawn=drawn)))
    assert (await soon(engine.agenerate(request))).stop_reason == "stop"


@pytest.mark.parametrize(
    ("drawn", "complaint"),
    [
        (TokenChunk([1, 2], [-1.0], [-5, -5], digests={-5: "a"}), r"a log-prob and a version for every token"),
        (TokenChunk([1], [-1.0], [-5]), r"the digest of every version, got none of \[-5\]"),
        (TokenChunk([10**6], [-1.0], [-5], digests={-5: "a"}), r"must lie in \[0, \d+\), got 1000000"),
        (TokenChunk([1] * 13, [-1.0] * 13, [-5] * 13, digests={-5: "a"}), r"must end where the answer does"),
    ],
)
async def test_impossible_drawn_tokens_are_refused_alone(
    engine: InferenceEngine, drawn: TokenChunk, complaint: str
) -> None:
    with pytest.raises(RequestError, match=complaint):
        await resumed(engine, drawn)
    assert (await answer(engine)).output_len == 12


async def test_drawn_tokens_of_other_weights_under_the_same_version_are_refused(
    engines: Engines, engine: InferenceEngine
) -> None:
    await engine.update_weights(update := engines.publish())
    drawn = TokenChunk([1], [-1.0], [update.version], digests={update.version: "others"})
    with pytest.raises(WeightMismatch, match="must get the same weights"):
        await resumed(engine, drawn)


async def test_gathered_chunks_join_to_the_same_answer(engine: InferenceEngine) -> None:
    whole = await answer(engine, seed=3, max_new_tokens=LONG)
    async with asyncio.timeout(60), aclosing(engine.astream(ask(seed=3, max_new_tokens=LONG), every_seconds=0.02)) as s:
        parts = [chunk async for chunk in s]
    assert [token for part in parts for token in part.tokens] == whole.output_tokens
    assert [version for part in parts for version in part.versions] == whole.output_versions
    assert {k: v for part in parts for k, v in part.digests.items()} == whole.digests


async def test_staged_weights_are_not_used_before_the_swap(engines: Engines, engine: InferenceEngine) -> None:
    await engine.update_weights(old := engines.publish())
    await engine.stage_weights(new := engines.publish())
    assert (await answer(engine)).digests == {old.version: old.digest}
    await engine.update_weights(new)
    assert (await answer(engine)).digests == {new.version: new.digest}
