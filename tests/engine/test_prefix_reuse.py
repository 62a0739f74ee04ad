"""Reused prefixes, prompts in pieces and faster layouts change how much is computed, never what comes out."""

import asyncio
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_models import TINY, training_engine

from areal.api.io_struct import ModelRequest, ModelResponse
from areal.config.rollout import GenerationHyperparameters
from areal.engine.inference import attention, decoder_runner, kv_cache, torch_kernel
from areal.engine.inference import engine as engine_module
from areal.engine.inference.attention import SharedPrefixes, decode_runs
from areal.engine.inference.decoder_runner import DecoderRunner
from areal.engine.inference.engine import EmbeddedEngine
from areal.engine.inference.torch_kernel import TorchKernel
from areal.engine.training.engine import TokenBatch, TrainingEngine
from areal.engine.training.packing import Span

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("kernel")]

TOLERANCE = 1e-4


@pytest.fixture
def short_prefixes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefixes of four tokens are cached and read together, rows change pools often, a step takes seven tokens."""
    monkeypatch.setattr(attention, "LEAST_SAVED", 1)
    monkeypatch.setattr(kv_cache, "SMALLEST_POOL", 8)
    monkeypatch.setattr(decoder_runner, "SHORTEST_PREFIX", 4)
    monkeypatch.setattr(DecoderRunner, "shortest_prefix", 4)
    monkeypatch.setattr(decoder_runner, "SMALLEST_CHUNK", 7)
    monkeypatch.setattr(decoder_runner, "CHUNK_FLOPS", 0)


class CountingRunner(DecoderRunner):
    """Counts the tokens that were computed, and the most prompt tokens of one step."""

    computed = 0
    largest_chunk = 0

    def forward(self, ids: Any, positions: Any, pieces: Any) -> Any:
        chunk = sum(piece.end - piece.start for piece in pieces)
        self.computed += len(ids) + chunk
        self.largest_chunk = max(self.largest_chunk, chunk)
        return super().forward(ids, positions, pieces)


def ask(ids: list[int], seed: int = 0, new: int = 5) -> ModelRequest:
    return ModelRequest("r", ids, GenerationHyperparameters(max_new_tokens=new, seed=seed))


def assert_exact(trainer: TrainingEngine, answers: list[ModelResponse]) -> None:
    """Every log-prob is the trainer's."""
    spans = []
    for answer in answers:
        ids = np.array(answer.input_tokens + answer.output_tokens)
        spans.append(Span(ids, np.arange(answer.input_len, len(ids)), group=0))
    sampled = torch.tensor([logprob for answer in answers for logprob in answer.output_logprobs])
    expected = trainer.logprobs(TokenBatch(spans, torch.ones(len(sampled))))
    torch.testing.assert_close(sampled, expected, atol=TOLERANCE, rtol=0)


PROMPT = st.tuples(st.integers(0, 2), st.integers(1, 20), st.integers(1, 6))
"""Which stem a prompt begins with, how much of it, and how many tokens follow."""


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    waves=st.lists(st.lists(PROMPT, min_size=1, max_size=5), min_size=1, max_size=4),
    delays=st.lists(st.integers(0, 6), min_size=20, max_size=20),
    swap_after=st.integers(0, 3),
)
async def test_logprobs_are_exact_however_requests_interleave(
    short_prefixes: None, waves: list[list[tuple[int, int, int]]], delays: list[int], swap_after: int
) -> None:
    """Waves of prompts with common stems, each wave continuing the last one's answers; the weights change once."""
    trainer = training_engine()
    engine = EmbeddedEngine(DecoderRunner(training_engine().decoder, prefix_bytes=60_000), max_running=3)
    stems = np.random.default_rng(0).integers(0, TINY.vocab_size, (3, 20)).tolist()
    past: list[ModelResponse] = []
    pause = iter(delays)
    for number, wave in enumerate(waves):
        prompts = [stems[stem][:kept] + list(range(extra)) for stem, kept, extra in wave]
        prompts += [answer.input_tokens + answer.output_tokens + [7, 8] for answer in past[-2:]]
        tasks = []
        for seed, ids in enumerate(prompts):
            tasks.append(asyncio.create_task(engine.agenerate(ask(ids, seed))))
            for _ in range(next(pause, 0)):
                await asyncio.sleep(0)
        past = await asyncio.gather(*tasks)
        assert_exact(trainer, past)
        if number == swap_after:
            trainer.flat.detach().mul_(1.1)
            trainer.version += 1
            await engine.update_weights(trainer.publish())
    await engine.aclose()
    trainer.close()


async def test_a_continued_conversation_computes_only_what_is_new() -> None:
    trainer = training_engine()
    runner = CountingRunner(training_engine().decoder)
    engine = EmbeddedEngine(runner)
    first = await engine.agenerate(ask(list(range(100)), new=20))
    before = runner.computed
    second = await engine.agenerate(ask(first.input_tokens + first.output_tokens + [1, 2, 3], new=1))
    assert runner.computed - before == 4  # the last token of the answer was drawn but never computed
    assert_exact(trainer, [first, second])
    await engine.aclose()


async def test_a_prompt_that_others_begin_with_is_computed_once() -> None:
    trainer = training_engine()
    runner = CountingRunner(training_engine().decoder)
    engine = EmbeddedEngine(runner)
    system = [token % 200 for token in range(500)]
    answers = await asyncio.gather(*(engine.agenerate(ask([*system, 201 + i], i, new=1)) for i in range(4)))
    assert runner.computed == 501 + 3
    assert_exact(trainer, answers)
    await engine.aclose()


async def test_nothing_computed_under_old_weights_is_reused() -> None:
    trainer = training_engine()
    engine = EmbeddedEngine(DecoderRunner(training_engine().decoder))
    await engine.agenerate(ask(list(range(100))))
    trainer.flat.detach().mul_(1.2)
    trainer.version = 1
    await engine.update_weights(trainer.publish())
    assert_exact(trainer, [await engine.agenerate(ask(list(range(100))))])
    await engine.aclose()
    trainer.close()


async def test_a_long_prompt_does_not_stall_running_requests(short_prefixes: None) -> None:
    runner = CountingRunner(training_engine().decoder)
    engine = EmbeddedEngine(runner)
    running = asyncio.create_task(engine.agenerate(ask([1, 2], new=60)))
    for _ in range(8):
        await asyncio.sleep(0)  # a step each
    before = engine.tokens_generated
    late = await engine.agenerate(ask(list(range(70)), new=1))
    assert runner.largest_chunk == 7
    assert engine.tokens_generated >= before + 70 // 7
    assert not running.done()
    assert_exact(training_engine(), [await running, late])
    await engine.aclose()


async def test_a_cancelled_prompt_in_pieces_leaves_room_for_the_next(short_prefixes: None) -> None:
    engine = EmbeddedEngine(DecoderRunner(training_engine().decoder))
    gone = asyncio.create_task(engine.agenerate(ask(list(range(70)))))
    for _ in range(4):
        await asyncio.sleep(0)
    gone.cancel()
    assert_exact(training_engine(), [await engine.agenerate(ask(list(range(10, 60))))])
    await engine.aclose()


def test_rows_are_read_apart_where_one_is_much_longer() -> None:
    for lengths in ([5, 6, 900, 7, 5], [900, 5, 5], [5, 5, 5], [300, 310, 20, 30], [1]):
        runs = decode_runs(torch.tensor(lengths) - 1, lengths)
        assert [row for run in runs for row in range(run.first, run.end)] == list(range(len(lengths)))
        assert all(run.length == max(lengths[run.first : run.end]) for run in runs)
        assert sum((run.end - run.first) * run.length for run in runs) <= sum(lengths) + 128 * len(lengths)


def test_rows_that_begin_alike_are_read_once_and_see_the_same() -> None:
    decoder = training_engine().decoder
    system, prompt = list(range(200)), list(range(150, 250))
    prompts = [system + prompt, prompt, system + prompt, prompt, [*system, 9], [7] * 80, system + prompt + [1]]
    rows = len(prompts)
    sharing, alone = DecoderRunner(decoder), DecoderRunner(decoder, prefix_bytes=0)
    for runner in (sharing, alone):
        runner.prefill(range(rows), prompts)
    lengths = [len(each) for each in prompts]
    for step in range(3):
        places = [length + step for length in lengths]
        torch.testing.assert_close(
            *(runner.decode([5] * rows, places) for runner in (sharing, alone)), atol=1e-4, rtol=1e-4
        )
    (prefix,) = sharing._shared.of(rows)  # two of the short prompt save too little
    assert (sorted(prefix.rows), prefix.length) == ([0, 2, 4, 6], 200)
    for runner in (sharing, alone):  # the fourth leaves, and the last takes its place
        runner.move(6, 3, lengths[6] + 3)
    places = [length + 3 for length in lengths]
    places[3] = places[6]
    torch.testing.assert_close(
        *(runner.decode([5] * 6, places[:6]) for runner in (sharing, alone)), atol=1e-4, rtol=1e-4
    )
    assert sorted(sharing._shared.of(6)[0].rows) == [0, 2, 3, 4]


@given(st.lists(st.lists(st.integers(0, 1), max_size=6), max_size=8))
def test_rows_that_share_a_prefix_have_it_in_common(filled: list[list[int]]) -> None:
    rows = SharedPrefixes(shortest=2)
    for row, ids in enumerate(filled):
        rows.fill(row, ids)
    prefixes = rows._search(len(filled))
    members = [row for prefix in prefixes for row in prefix.rows]
    assert len(members) == len(set(members))
    for prefix in prefixes:
        assert prefix.length >= 2
        assert len({tuple(filled[row][: prefix.length]) for row in prefix.rows}) == 1
        assert all(len(filled[row]) >= prefix.length for row in prefix.rows)


@pytest.mark.parametrize("batch", [1, 3, 60])
def test_faster_layouts_compute_the_same_and_follow_the_weights(batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder, trainer = training_engine().decoder, training_engine()
    plain = DecoderRunner(decoder, kernel="torch")
    monkeypatch.setattr(torch_kernel, "SMALLEST_BYTES", 0)
    fast = DecoderRunner(decoder, kernel="torch")
    assert isinstance(fast.kernel, TorchKernel)
    assert fast.kernel.matrices.weights
    prompts = [[i, i + 1, i + 2] for i in range(batch)]
    for _ in range(2):
        for runner in (plain, fast):
            runner.prefill(range(batch), prompts)
        logits = [runner.decode([9] * batch, [3] * batch) for runner in (plain, fast)]
        torch.testing.assert_close(*logits, atol=1e-4, rtol=1e-4)
        with torch.no_grad():
            decoder.flat.copy_(trainer.flat * 1.3)


async def test_faster_layouts_follow_a_swap_whatever_was_asked_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_kernel, "SMALLEST_BYTES", 0)
    trainer = training_engine()
    engine = EmbeddedEngine(DecoderRunner(training_engine().decoder))
    running = asyncio.create_task(engine.agenerate(ask([1, 2, 3], new=200)))
    for _ in range(100):
        await asyncio.sleep(0)
    trainer.flat.detach().mul_(1.1)
    trainer.version = 1
    await engine.update_weights(trainer.publish())
    assert (await running).output_versions[-1] == 1
    await engine.aclose()
    trainer.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layouts_that_were_prepared_before_a_swap_are_those_made_after_it(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_kernel, "SMALLEST_BYTES", 0)
    engines = training_engine(), training_engine()
    waiting, prepared = (DecoderRunner(engine.decoder, dtype=dtype) for engine in engines)
    for runner in (waiting, prepared):
        runner.prefill([0], [[1, 2, 3]])
    new = [(tensor.detach(), tensor.detach() * 1.3) for _, tensor in prepared.named_weights()]
    layouts = prepared.prepare(new)
    assert (layouts is not None) == prepared.kernel.fits_twice
    assert torch.equal(prepared.decode([5], [3]), waiting.decode([5], [3])), "the present weights count until the swap"
    for tensor, value in new:
        tensor.copy_(value)
    prepared.adopt(layouts)
    engines[0].decoder.flat.detach().mul_(1.3)
    for batch in (1, 3, 60):
        prompts = [[i, i + 1, i + 2] for i in range(batch)]
        for runner in (waiting, prepared):
            runner.prefill(range(batch), prompts)
        logits = [runner.decode([9] * batch, [3] * batch) for runner in (waiting, prepared)]
        assert torch.equal(*logits)


def test_bfloat16_has_no_layouts_where_the_processor_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_kernel, "SMALLEST_BYTES", 0)
    runner = DecoderRunner(training_engine().decoder, dtype=torch.bfloat16, kernel="torch")
    runner.prefill([0], [[1, 2, 3]])
    assert runner.decode([5], [3]).isfinite().all()
    assert isinstance(runner.kernel, TorchKernel)
    assert bool(runner.kernel.matrices.weights) == torch.ops.mkldnn._is_mkldnn_bf16_supported()


def test_bfloat16_is_close_and_follows_the_weights() -> None:
    decoder = training_engine().decoder
    exact, rough = DecoderRunner(decoder), DecoderRunner(decoder, dtype=torch.bfloat16)
    with torch.no_grad():
        decoder.flat *= 0.9
    for runner in (exact, rough):
        runner.prefill([0], [[1, 2, 3, 4]])
    logits = [runner.decode([5], [4]).log_softmax(-1) for runner in (exact, rough)]
    assert logits[1].dtype == torch.float32
    assert (logits[0] - logits[1]).abs().max() < 0.3


async def test_weights_checked_in_a_thread_are_swapped_between_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "SMALL_WEIGHTS_BYTES", 0)
    trainer = training_engine()
    engine = EmbeddedEngine(DecoderRunner(training_engine().decoder))
    running = asyncio.create_task(engine.agenerate(ask([1, 2, 3], new=2000)))
    await asyncio.sleep(0)
    trainer.flat.detach().mul_(1.1)
    trainer.version = 1
    await engine.update_weights(trainer.publish())
    answer = await running
    assert answer.output_versions == sorted(answer.output_versions)
    assert answer.output_versions[-1] == 1
    (pause,) = engine.pauses()
    (swap,) = engine.swaps()
    assert pause > swap > 0
    assert engine.pauses() == engine.swaps() == []
    at = answer.output_versions.index(1)
    head = answer.input_tokens + answer.output_tokens[:at]
    tail = ModelResponse(head, answer.output_tokens[at:], answer.output_logprobs[at:], [1] * (2000 - at), "length")
    assert_exact(trainer, [tail])
    await engine.aclose()
    trainer.close()
