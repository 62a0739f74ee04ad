"""What vLLM does in its own way: log-probs, grammars, weights, going on from drawn tokens, and what it refuses."""

import asyncio
import json
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import pytest
import torch
from engine_kinds import answer, ask, begin, patience, soon, until
from test_agreement import recomputed, requests
from test_resumed_answers import beginning, resumed
from tiny_models import byte_tokenizer
from vllm_engines import VllmEngines

from areal.api.engine_api import InferenceEngine
from areal.api.errors import DrawnRefused, GrammarError, RequestError, WeightMismatch
from areal.api.io_struct import Grammar, ModelResponse, TokenChunk

pytestmark = pytest.mark.asyncio(loop_scope="session")

TOLERANCE = 1e-4
DIGITS = Grammar("lark", "start: /[0-9]{9}/")
NAMED = Grammar(
    "json_schema",
    json.dumps(
        {"type": "object", "properties": {"n": {"enum": [1, 22]}}, "required": ["n"], "additionalProperties": False}
    ),
    "response_format",
)


def logprobs_of(answers: list[ModelResponse]) -> torch.Tensor:
    return torch.tensor([logprob for response in answers for logprob in response.output_logprobs])


async def test_logprobs_are_the_trainers_at_every_temperature_and_limit(
    engines: VllmEngines, engine: InferenceEngine
) -> None:
    await engine.update_weights(engines.publish())
    asked = requests(28)
    answers = await asyncio.wait_for(asyncio.gather(*map(engine.agenerate, asked)), 300)
    differences = (recomputed(engines.trainer, asked, answers) - logprobs_of(answers)).abs()
    print(f"log-probs of vLLM and of the trainer differ by {differences.max():.1e} at most")
    assert differences.max() < TOLERANCE


async def test_logprobs_under_a_grammar_are_those_of_what_it_leaves(
    engines: VllmEngines, engine: InferenceEngine
) -> None:
    await engine.update_weights(engines.publish())
    asked = [replace(ask(seed=seed, max_new_tokens=20, temperature=0.7), grammar=DIGITS) for seed in range(4)]
    free = ask(seed=9, max_new_tokens=20)  # shares the steps of the others
    *answers, unbound = await soon(asyncio.gather(*map(engine.agenerate, [*asked, free])))
    assert all(byte_tokenizer().decode(each.output_tokens).isdigit() for each in answers)
    torch.testing.assert_close(
        recomputed(engines.trainer, [*asked, free], [*answers, unbound]),
        logprobs_of([*answers, unbound]),
        atol=TOLERANCE,
        rtol=0,
    )


async def test_tokens_after_a_swap_are_computed_with_the_new_weights_alone(
    engines: VllmEngines, engine: InferenceEngine
) -> None:
    await engine.update_weights(old := engines.publish())
    flats = {old.version: engines.trainer.flat.detach().clone()}
    asked = [ask([5 + i] * (3 + 9 * i), seed=i, max_new_tokens=60) for i in range(4)]
    tasks = [asyncio.create_task(engine.agenerate(request)) for request in asked]
    await until(engine, running=4)
    await engine.update_weights(new := engines.publish())
    flats[new.version] = engines.trainer.flat.detach().clone()
    answers = await soon(asyncio.gather(*tasks))
    versions = torch.tensor([version for response in answers for version in response.output_versions])
    assert set(versions.tolist()) == set(flats)
    for version, flat in flats.items():
        engines.trainer.flat.copy_(flat)
        drawn = versions == version
        found = recomputed(engines.trainer, asked, answers)[drawn]
        torch.testing.assert_close(found, logprobs_of(answers)[drawn], atol=TOLERANCE, rtol=0)


async def test_a_long_prompt_with_a_seed_is_answered_among_others(engine: InferenceEngine) -> None:
    long = [ask([i + 1] * 4000, seed=i, max_new_tokens=4) for i in range(3)]
    short = [ask(seed=i, max_new_tokens=30) for i in range(3)]
    answers = await asyncio.wait_for(asyncio.gather(*map(engine.agenerate, [*long, *short])), 300)
    assert [each.output_len for each in answers] == [4, 4, 4, 30, 30, 30]
    assert (await asyncio.wait_for(engine.agenerate(long[0]), 300)).output_tokens == answers[0].output_tokens


@pytest.mark.parametrize("stops", [[], ["end"], ["end", 7]])
async def test_a_json_schema_is_kept_whatever_ends_the_answer(engine: InferenceEngine, stops: list[Any]) -> None:
    end = byte_tokenizer().eos_token_id
    stop_ids = [end if stop == "end" else stop for stop in stops]
    for seed in range(3):
        request = replace(ask(seed=seed, max_new_tokens=200, stop_token_ids=stop_ids), grammar=NAMED)
        response = await soon(engine.agenerate(request))
        assert response.stop_reason == "stop"
        text = byte_tokenizer().decode([token for token in response.output_tokens if token != end])
        assert json.loads(text)["n"] in (1, 22)
        assert (response.output_tokens[-1] == end) == bool(stops)


async def test_a_grammar_that_is_none_is_refused_alone(engine: InferenceEngine) -> None:
    with pytest.raises(GrammarError, match="the tool choice cannot be honoured"):
        await soon(engine.agenerate(replace(ask(), grammar=Grammar("lark", "start: %", "the tool choice"))))
    assert (await answer(engine)).output_len == 12


async def test_greedy_answer_goes_on_from_drawn_tokens_as_if_uninterrupted(engine: InferenceEngine) -> None:
    whole = await answer(engine, max_new_tokens=30, greedy=True)
    for count in (0, 1, 17, 29):
        again = await resumed(engine, beginning(whole, count), max_new_tokens=30, greedy=True)
        assert again.output_tokens == whole.output_tokens
        assert again.output_logprobs == pytest.approx(whole.output_logprobs, abs=TOLERANCE)


async def test_sampled_answer_goes_on_from_drawn_tokens_with_the_same_seed_each_time(engine: InferenceEngine) -> None:
    drawn = TokenChunk([7, 8, 9], [-1.5, -2.5, -3.5], [-8, -8, -7], digests={-8: "a", -7: "b"})
    first, again = [await resumed(engine, drawn, seed=1) for _ in range(2)]
    other = await resumed(engine, drawn, seed=2)
    assert first.output_tokens == again.output_tokens != other.output_tokens
    assert first.output_tokens[:3] == [7, 8, 9]
    assert (first.output_logprobs[:3], first.output_versions[:3]) == ([-1.5, -2.5, -3.5], [-8, -8, -7])
    assert first.output_len == 12
    unresumed = await answer(engine, [1, 2, 3, 7, 8, 9], seed=1)
    assert first.output_tokens[3:] != unresumed.output_tokens[:9]  # its seed's stream does not begin again


async def test_constrained_answer_begins_again_rather_than_go_on(engine: InferenceEngine) -> None:
    request = replace(ask(seed=2, max_new_tokens=20), grammar=DIGITS)
    whole = await soon(engine.agenerate(request))
    with pytest.raises(DrawnRefused, match="only from its first token on"):
        await soon(engine.agenerate(replace(request, drawn=beginning(whole, 4))))
    assert (await soon(engine.agenerate(replace(request, drawn=TokenChunk())))).output_tokens == whole.output_tokens


@pytest.mark.parametrize(
    ("settings", "changes", "complaint"),
    [
        ({"temperature": 2.5}, {}, r"temperatures in \[0.01, 2\], got 2.5"),
        ({"temperature": 0.001}, {}, r"temperatures in \[0.01, 2\], got 0.001"),
        ({"min_new_tokens": 3}, {"grammar": NAMED}, "response_format cannot be combined with min_new_tokens"),
        ({}, {"images": [b"png"]}, "images are not sent to vLLM, got 1"),
    ],
)
async def test_what_vllm_cannot_honour_is_refused_by_name(
    engine: InferenceEngine, settings: dict[str, Any], changes: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(RequestError, match=complaint):
        await soon(engine.agenerate(replace(ask(**settings), **changes)))


async def test_weights_of_another_digest_are_refused_and_the_old_ones_serve_on(
    engines: VllmEngines, engine: InferenceEngine
) -> None:
    await engine.update_weights(good := engines.publish())
    with pytest.raises(WeightMismatch, match="must have the digest 0000"):
        await engine.update_weights(replace(engines.publish(), digest="0" * 32))
    assert (await answer(engine)).digests == {good.version: good.digest}


async def test_staged_weights_are_not_used_before_the_swap(engines: VllmEngines, engine: InferenceEngine) -> None:
    await engine.update_weights(old := engines.publish())
    await engine.stage_weights(new := engines.publish())
    assert (await answer(engine)).digests == {old.version: old.digest}
    await engine.update_weights(new)
    assert (await answer(engine)).digests == {new.version: new.digest}


async def test_a_slow_reader_learns_the_version_that_drew_each_token(
    engines: VllmEngines, engine: InferenceEngine
) -> None:
    """Tokens wait for it through a swap; what it reads afterwards was drawn before."""
    await engine.update_weights(old := engines.publish())
    async with patience(), aclosing(engine.astream(ask(max_new_tokens=600, seed=1))) as chunks:
        read = await anext(chunks)
        await answer(engine, max_new_tokens=20)
        await engine.update_weights(new := engines.publish())
        async for chunk in chunks:
            read.extend(chunk)
    assert chunk.response is not None
    assert read.versions == chunk.response.output_versions
    assert read.versions.count(old.version) > 10
    assert set(read.versions) == {old.version, new.version}


async def test_pauses_are_counted_when_they_hold_up_requests(engines: VllmEngines) -> None:
    engine = await engines.open()
    await engine.pauses()
    await engine.update_weights(engines.publish())
    assert await engine.pauses() == []
    tasks = await begin(engine, 2, max_new_tokens=1000)
    await engine.update_weights(engines.publish())
    await soon(asyncio.gather(*tasks))
    (pause,) = await engine.pauses()
    print(f"a change of weights held up requests for {pause:.2f} s")
    assert await engine.activity()
    await engine.aclose()


async def test_a_server_that_runs_already_is_used_with_the_weights_that_it_has(engines: VllmEngines) -> None:
    engine = await engines.open()
    await engine.update_weights(update := engines.publish())
    direct = await engines.open_directly()
    health = await direct.health()
    assert (health.version, health.digest) == (update.version, update.digest)
    asked = ask(seed=3, max_new_tokens=20)
    assert (await soon(direct.agenerate(asked))).output_tokens == (await soon(engine.agenerate(asked))).output_tokens
    await direct.aclose()
    assert (await answer(engine)).output_len == 12
    await engine.aclose()
