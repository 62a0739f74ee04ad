"""Engine and trainer take log-probs over the same tokens, under every mask, whatever happened while they were drawn."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from drawn_rows import READER, row_of
from test_agreement import TOLERANCE, recomputed
from tiny_models import TINY, byte_tokenizer, training_engine, write_model

from areal.api.errors import ArealError, RequestError
from areal.api.io_struct import Choices, Grammar, ModelRequest, ModelResponse, TokenChunk
from areal.config.rollout import GenerationHyperparameters
from areal.engine.inference import sequence
from areal.engine.inference.engine import EmbeddedEngine
from areal.engine.inference.group import EngineGroup
from areal.engine.inference.server import load_engine
from areal.engine.training.choices import ChoiceReader

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("kernel")]

SCHEMA = Grammar("json_schema", '{"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}')
WORDS = Grammar("lark", 'start: /[a-z]{3,40}/ (" " /[0-9]+/)?')
STOPS = [byte_tokenizer().eos_token_id, 17]
MASKS: list[tuple[Grammar | None, dict[str, Any]]] = [
    (SCHEMA, {}),
    (WORDS, {"temperature": 0.6}),
    (WORDS, {"min_new_tokens": 20}),
    (None, {"min_new_tokens": 9, "temperature": 1.4}),
    (None, {"top_p": 0.8}),
    (None, {"top_k": 5, "temperature": 0.7}),
    (WORDS, {"top_p": 0.7, "temperature": 1.3}),
    (SCHEMA, {"top_k": 4, "top_p": 0.95, "min_new_tokens": 12, "temperature": 0.8}),
    (None, {}),
]


def asked(count: int = 2 * len(MASKS), **fixed: Any) -> list[ModelRequest]:
    draw = np.random.default_rng(1)
    requests = []
    for number in range(count):
        grammar, settings = MASKS[number % len(MASKS)]
        settings = {"max_new_tokens": 40, "seed": number, "stop_token_ids": STOPS} | settings | fixed
        prompt = draw.integers(0, 256, draw.integers(1, 40)).tolist()
        requests.append(ModelRequest(str(number), prompt, GenerationHyperparameters(**settings), grammar=grammar))
    return requests


def sampled(answers: Sequence[ModelResponse]) -> torch.Tensor:
    return torch.tensor([logprob for answer in answers for logprob in answer.output_logprobs])


async def test_logprobs_agree_under_every_mask(tmp_path: Path) -> None:
    engine, requests = load_engine(write_model(tmp_path)), asked()
    answers = await asyncio.gather(*map(engine.agenerate, requests))
    await engine.aclose()
    computed = recomputed(training_engine(), requests, answers)
    torch.testing.assert_close(computed, sampled(answers), atol=TOLERANCE, rtol=0)
    whole = [replace(answer, choices=None) for answer in answers]
    assert (recomputed(training_engine(), requests, whole) - sampled(answers)).abs().max() > 0.1, "masks matter"
    assert answers[-1].choices is None


async def test_sets_are_those_of_the_weights_that_drew(tmp_path: Path) -> None:
    engine, trainer = load_engine(write_model(tmp_path)), training_engine()
    requests = asked(max_new_tokens=120, stop_token_ids=[])
    tasks = [asyncio.create_task(engine.agenerate(request)) for request in requests]
    flats = {0: trainer.flat.detach().clone()}
    for version in (1, 2):
        produced = engine.tokens_generated
        async with asyncio.timeout(60):
            while engine.tokens_generated < produced + 150:
                await engine.health()
                await asyncio.sleep(0)
        trainer.version = version
        with torch.no_grad():
            trainer.flat *= 1.1
        flats[version] = trainer.flat.detach().clone()
        await engine.update_weights(trainer.publish())
    answers = await asyncio.gather(*tasks)
    await engine.aclose()
    versions = torch.tensor([version for answer in answers for version in answer.output_versions])
    assert set(versions.tolist()) == {0, 1, 2}
    for version, flat in flats.items():
        with torch.no_grad():
            trainer.flat.copy_(flat)
        own = versions == version
        computed = recomputed(trainer, requests, answers)
        torch.testing.assert_close(computed[own], sampled(answers)[own], atol=TOLERANCE, rtol=0)


async def test_an_answer_that_moves_to_another_engine_keeps_its_sets(tmp_path: Path) -> None:
    model = write_model(tmp_path)
    first, second, group = load_engine(model), load_engine(model), EngineGroup()
    group.add("first", first)
    requests = asked(max_new_tokens=60, stop_token_ids=[])
    tasks = [asyncio.create_task(_streamed(group, request)) for request in requests]
    async with asyncio.timeout(60):
        while first.tokens_generated < 200:
            await first.health()
            await asyncio.sleep(0)
    group.add("second", second)
    await first.aclose()
    streams = await asyncio.gather(*tasks)
    await second.aclose()
    assert group.moved > 0
    answers = [stream.response for stream in streams if stream.response is not None]
    computed = recomputed(training_engine(), requests, answers)
    torch.testing.assert_close(computed, sampled(answers), atol=TOLERANCE, rtol=0)
    for stream, answer in zip(streams, answers, strict=True):
        sets = [] if answer.choices is None else answer.choices.sets()
        assert [left.tolist() for left in stream.sets] == [left.tolist() for left in sets]


async def _streamed(engine: Any, request: ModelRequest) -> TokenChunk:
    whole = TokenChunk()
    async for chunk in engine.astream(request):
        whole.extend(chunk)
        whole.response = chunk.response
    return whole


async def test_an_answer_whose_sets_grow_too_large_is_ended_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that asks for most of a large vocabulary at every token must not fill the engine's memory."""
    monkeypatch.setattr(sequence, "MAX_SET_TOKENS", 1000)
    engine = load_engine(write_model(tmp_path))
    gconfig = GenerationHyperparameters(max_new_tokens=40, seed=1, top_k=200)
    large = engine.agenerate(ModelRequest("large", [1, 2], gconfig))
    small = engine.agenerate(ModelRequest("small", [1, 2], gconfig.new(top_k=25)))
    failed, answer = await asyncio.gather(large, small, return_exceptions=True)
    drawn = TokenChunk([3] * 6, [-1.0] * 6, [0] * 6, digests={0: "any"}, sets=[np.arange(200, dtype=np.int32)] * 6)
    drawn.digests[0] = (await engine.health()).digest
    with pytest.raises(RequestError, match="at most 1000 tokens"):
        await engine.agenerate(ModelRequest("moved", [1, 2], gconfig, drawn=drawn))
    await engine.aclose()
    assert isinstance(failed, RequestError)
    assert "got 1200 after 6 tokens with top_p=1 and top_k=200; lower top_k" in str(failed)
    assert isinstance(answer, ModelResponse)
    assert answer.output_len == 40


async def test_alternatives_are_of_what_was_drawn_from(tmp_path: Path) -> None:
    engine: EmbeddedEngine = load_engine(write_model(tmp_path))
    answers = await asyncio.gather(*(engine.agenerate(replace(each, top_logprobs=300)) for each in asked()))
    await engine.aclose()
    for answer in answers:
        pairs = zip(answer.output_alternatives, answer.output_tokens, answer.output_logprobs, strict=True)
        for told, token, logprob in pairs:
            assert told[token] == pytest.approx(logprob, abs=1e-4)
            assert sum(np.exp(list(told.values()))) == pytest.approx(1, abs=1e-4)


async def test_a_token_without_a_choice_is_a_set_of_one(tmp_path: Path) -> None:
    engine = load_engine(write_model(tmp_path))
    gconfig = GenerationHyperparameters(max_new_tokens=9, seed=1, stop_token_ids=STOPS)
    grammar = Grammar("lark", 'start: "ab" ("c" | "d")')
    answer = await engine.agenerate(ModelRequest("fixed", [1, 2], gconfig, grammar=grammar))
    greedy = await engine.agenerate(ModelRequest("greedy", [1, 2], gconfig.new(greedy=True, top_p=0.5)))
    await engine.aclose()
    found = READER.read([row_of(answer)])
    assert found is not None
    sets, numbers = found
    assert sets.single[numbers].tolist() == [True, True, False, False]  # it may end with either of two stop tokens
    assert [answer.output_logprobs[0], answer.output_logprobs[1]] == [0, 0]
    assert greedy.choices == Choices(0, 9, greedy=True)


def test_what_cannot_be_read_is_refused_with_the_remedy() -> None:
    response = ModelResponse([1], [2, 3], [-1.0, -1.0], [0, 0], "stop")
    broken = replace(response, choices=Choices(0, 2, grammar_kind="lark", grammar_text='start: "a"'))
    with pytest.raises(ArealError, match="must follow the grammar that it was drawn under"):
        READER.read([row_of(broken)])
    with pytest.raises(ArealError, match="trained with the model's tokenizer, and there is none"):
        ChoiceReader().read([row_of(broken)])
    unknown = replace(response, choices=Choices(0, 2, unreported="vLLM"))
    with pytest.raises(ArealError, match=r"vLLM does not report what these leave .* rollout.backend=embedded"):
        READER.read([row_of(unknown)])


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        (Choices(0, 2, sizes=np.array([2, 1]), ids=np.array([2, 4, 5])), "token 3, the 2. of the answer, is not among"),
        (Choices(0, 2, sizes=np.array([1]), ids=np.array([2])), "2 tokens have 1 sets of 1 tokens"),
        (Choices(0, 2, sizes=np.array([1, 2]), ids=np.array([2, 3])), "2 sets of 3 tokens, and there are 2"),
        (Choices(0, 2, sizes=np.array([2, 0]), ids=np.array([2, 3])), "2 sets of 2 tokens, and there are 2"),
        (Choices(0, 2, sizes=np.array([1, 2]), ids=np.array([2, -1, 3])), "2 sets of 3 tokens, and there are 3"),
        (Choices(0, 2, stops=[3], min_new_tokens=2), "one of its first 2 tokens ends it"),
    ],
)
def test_a_token_that_could_not_be_drawn_is_refused(choices: Choices, message: str) -> None:
    response = ModelResponse([1], [2, 3], [-1.0, -1.0], [0, 0], "stop", choices=choices)
    with pytest.raises(ArealError, match=message):
        ChoiceReader().read([row_of(response)])


def test_sets_that_are_the_same_are_kept_once() -> None:
    stops = Choices(0, 40, stops=[5, 7], min_new_tokens=30)
    response = ModelResponse([1], [2] * 40, [-1.0] * 40, [0] * 40, "stop", choices=stops)
    found = READER.read([row_of(response), row_of(response)])
    assert found is not None
    sets, numbers = found
    assert numbers.tolist() == ([1] * 30 + [0] * 10) * 2
    assert (sets.ids.tolist(), sets.inverted.tolist()) == ([5, 7], [True, True])
    assert READER.read([row_of(replace(response, choices=None))]) is None


def test_vocabulary_is_the_models() -> None:
    """Ids that no text has are never drawn under a grammar, whichever way a set is kept."""
    dots = Choices(0, 1, grammar_kind="lark", grammar_text="start: /.+/s")
    response = ModelResponse([1], byte_tokenizer().encode("x"), [-1.0], [0], "stop", choices=dots)
    found = READER.read([row_of(response)])
    assert found is not None
    sets, _ = found
    assert bool(sets.inverted[1])
    assert TINY.vocab_size - 1 in sets.ids.tolist()
