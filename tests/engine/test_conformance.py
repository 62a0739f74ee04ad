"""What every engine does, on each engine: embedded in this process, embedded as a server process,
a group of two embedded ones, and the fake one."""

import asyncio
from dataclasses import replace

import pytest
from engine_kinds import LONG, Engines, answer, ask, begin, soon, until
from tiny_models import byte_tokenizer

from areal.api.engine_api import InferenceEngine
from areal.api.errors import ContextLengthError, EngineError, RequestError

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]


async def test_it_is_an_inference_engine(engine: InferenceEngine) -> None:
    assert isinstance(engine, InferenceEngine)


async def test_greedy_answers_are_the_same_whatever_the_seed(engine: InferenceEngine) -> None:
    first = await answer(engine, greedy=True, seed=1)
    again = await answer(engine, greedy=True, seed=2)
    cold = await answer(engine, temperature=0, seed=3)
    assert first.output_tokens == again.output_tokens == cold.output_tokens
    assert first.output_logprobs == pytest.approx(again.output_logprobs, abs=1e-4)


async def test_a_seed_gives_the_same_tokens_whatever_shares_the_batch(engine: InferenceEngine) -> None:
    alone = [await answer(engine, [9] * (1 + i % 3), seed=i, temperature=1.3) for i in range(6)]
    crowd = [
        ask([9] * (1 + i % 3), seed=i, temperature=1.3, max_new_tokens=12, top_k=0 if i < 6 else 3) for i in range(40)
    ]
    together = await soon(asyncio.gather(*map(engine.agenerate, reversed(crowd))))
    assert [r.output_tokens for r in alone] == [r.output_tokens for r in together[::-1][:6]]


async def test_different_seeds_give_different_tokens(engine: InferenceEngine) -> None:
    answers = [await answer(engine, seed=seed) for seed in range(5)]
    assert len({tuple(each.output_tokens) for each in answers}) == 5


async def test_alternatives_come_when_they_are_asked_for_and_are_refused_by_engines_of_others(
    engines: Engines, engine: InferenceEngine
) -> None:
    request = replace(ask(greedy=True), top_logprobs=3)
    if engines.of_others:
        with pytest.raises(RequestError, match="top_logprobs"):
            await soon(engine.agenerate(request))
        return
    asked = await soon(engine.agenerate(request))
    assert [len(each) for each in asked.output_alternatives] == [3] * asked.output_len
    assert [next(iter(each)) for each in asked.output_alternatives] == asked.output_tokens
    assert (await answer(engine, greedy=True)).output_alternatives == []


async def test_an_answer_that_reaches_max_new_tokens_says_length(engine: InferenceEngine) -> None:
    response = await answer(engine, [7, 8], max_new_tokens=5, seed=1)
    assert response.stop_reason == "length"
    assert response.input_tokens == [7, 8]
    assert response.output_len == len(response.output_logprobs) == len(response.output_versions) == 5
    assert all(logprob <= 0 for logprob in response.output_logprobs)


async def test_a_stop_token_ends_the_answer_and_is_kept(engine: InferenceEngine) -> None:
    free = (await answer(engine, seed=4)).output_tokens
    end = free.index(free[6])
    response = await answer(engine, seed=4, stop_token_ids=[free[6], 10**9, -1])
    assert response.stop_reason == "stop"
    assert response.output_tokens == free[: end + 1]


async def test_a_stop_text_ends_the_answer_with_the_token_that_completes_it(engine: InferenceEngine) -> None:
    tokenizer = byte_tokenizer()
    free = (await answer(engine, seed=4, max_new_tokens=300)).output_tokens
    texts = [tokenizer.decode(token) for token in free]
    place = next(i for i in range(3, 299) if all(text.isascii() and text.isprintable() for text in texts[i : i + 2]))
    stop = "".join(texts[place : place + 2])
    response = await answer(engine, seed=4, max_new_tokens=300, stop=["never in it", stop])
    assert response.stop_reason == "stop"
    assert tokenizer.decode(response.output_tokens).endswith(stop)
    assert response.output_tokens == free[: len(response.output_tokens)]
    assert stop not in tokenizer.decode(response.output_tokens[:-1])


async def test_no_stop_token_is_drawn_before_min_new_tokens(engine: InferenceEngine) -> None:
    stops = (await answer(engine, seed=4)).output_tokens[:3]
    response = await answer(engine, seed=4, stop_token_ids=stops, min_new_tokens=6, max_new_tokens=12)
    assert response.output_len > 6
    assert not set(stops) & set(response.output_tokens[:6])


async def test_a_stop_text_that_min_new_tokens_let_pass_does_not_end_the_answer_later(engine: InferenceEngine) -> None:
    tokenizer = byte_tokenizer()
    free = (await answer(engine, seed=4, max_new_tokens=40)).output_tokens
    early = tokenizer.decode(free[:1])
    response = await answer(engine, seed=4, max_new_tokens=40, min_new_tokens=2, stop=[early])
    later = [i for i in range(2, 40) if tokenizer.decode(free[i : i + 1]) == early]
    assert response.output_len == (later[0] + 1 if later else 40)


async def test_every_token_carries_the_version_and_digest_of_its_weights(
    engines: Engines, engine: InferenceEngine
) -> None:
    update = engines.publish()
    await engine.update_weights(update)
    health = await engine.health()
    response = await answer(engine, seed=1)
    assert (health.version, health.digest) == (update.version, update.digest)
    assert response.output_versions == [update.version] * 12
    assert response.digests == {update.version: update.digest}


async def test_new_weights_reach_running_requests_without_dropping_any(
    engines: Engines, engine: InferenceEngine
) -> None:
    await engine.update_weights(old := engines.publish())
    tasks = await begin(engine, 3, max_new_tokens=LONG)
    await engine.update_weights(new := engines.publish())
    for response in await soon(asyncio.gather(*tasks)):
        versions = response.output_versions
        assert response.output_len == LONG
        assert versions == sorted(versions)
        assert set(versions) == {old.version, new.version}
        assert response.digests == {old.version: old.digest, new.version: new.digest}


async def test_a_paused_engine_draws_nothing_and_goes_on_where_it_was(
    engines: Engines, engine: InferenceEngine
) -> None:
    await engine.update_weights(first := engines.publish())
    (task,) = await begin(engine, max_new_tokens=LONG)
    await engine.pause()
    await engine.update_weights(engines.publish())
    joined = asyncio.create_task(engine.agenerate(ask(seed=1)))
    health = await until(engine, running=1, waiting=1)
    assert health.paused
    await engine.update_weights(third := engines.publish())
    await engine.resume()
    assert set((await soon(task)).output_versions) == {first.version, third.version}
    assert set((await soon(joined)).output_versions) == {third.version}
    assert not (await engine.health()).paused


async def test_cancelled_requests_leave_the_engine(engine: InferenceEngine) -> None:
    tasks = await begin(engine, 3, max_new_tokens=LONG)
    await engine.pause()
    tasks.append(asyncio.create_task(engine.agenerate(ask())))
    await until(engine, running=3, waiting=1)
    for task in tasks[1:]:
        task.cancel()
    await until(engine, running=1, waiting=0)
    await engine.resume()
    assert (await soon(tasks[0])).output_len == LONG
    await until(engine, running=0, waiting=0)


async def test_weights_may_change_after_every_running_request_was_cancelled(
    engines: Engines, engine: InferenceEngine
) -> None:
    (task,) = await begin(engine, max_new_tokens=LONG)
    task.cancel()
    await engine.update_weights(engines.publish())
    await until(engine, running=0, waiting=0)
    assert (await answer(engine, seed=1)).output_len == 12


async def test_a_request_longer_than_the_model_is_refused_alone(engine: InferenceEngine) -> None:
    with pytest.raises(ContextLengthError, match="4096 positions"):
        await answer(engine, [1] * 4000, max_new_tokens=97)
    assert (await answer(engine, [1] * 4084, max_new_tokens=12)).output_len == 12


async def test_tokens_outside_the_vocabulary_are_refused_alone(engine: InferenceEngine) -> None:
    for foreign in (10**6, -1):
        with pytest.raises(RequestError, match=r"got .*; encode prompts with the model's own tokenizer"):
            await answer(engine, [1, foreign])
    assert (await answer(engine)).output_len == 12


async def test_two_hundred_requests_at_once_are_all_answered_rightly(engine: InferenceEngine) -> None:
    requests = [ask([i, *range(1, 2 + i % 7)], seed=i, max_new_tokens=1 + i % 23) for i in range(200)]
    answers = await soon(asyncio.gather(*map(engine.agenerate, requests)))
    for request, got in zip(requests, answers, strict=True):
        assert got.input_tokens == request.input_ids
        assert got.output_len == request.gconfig.max_new_tokens
    for request, got in list(zip(requests, answers, strict=True))[::20]:
        assert (await soon(engine.agenerate(request))).output_tokens == got.output_tokens
    await until(engine, running=0, waiting=0)


async def test_closing_fails_pending_and_later_calls(engines: Engines) -> None:
    engine = await engines.open()
    tasks = await begin(engine, 2, max_new_tokens=LONG)
    await engine.pause()
    tasks.append(asyncio.create_task(engine.agenerate(ask(max_new_tokens=LONG))))
    await until(engine, running=2, waiting=1)
    await engine.resume()
    await engine.aclose()
    for outcome in await soon(asyncio.gather(*tasks, return_exceptions=True)):
        assert isinstance(outcome, EngineError)
    with pytest.raises(EngineError):
        await answer(engine)
    with pytest.raises(EngineError):
        await soon(engine.health())
