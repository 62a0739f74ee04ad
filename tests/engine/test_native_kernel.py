"""The kernel in C++ computes what torch computes, for every architecture and every way that a step can be made up."""

import ctypes
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_models import TINY, randomise
from torch import Tensor

from areal.api.errors import KernelUnavailable
from areal.engine.inference import attention, decoder_runner, kv_cache
from areal.engine.inference.decoder_runner import DecoderRunner
from areal.engine.inference.model_runner import Piece
from areal.engine.inference.sampler import SamplingParams, sample, uniforms
from areal.engine.model.architecture import Architecture, RopeScaling
from areal.engine.model.decoder import Decoder
from areal.engine.native import kernel as kernel_module
from areal.engine.native.kernel import NativeKernel
from areal.engine.native.library import load

TOLERANCE = 3e-5


@pytest.fixture(autouse=True, scope="module")
def _library() -> None:
    try:
        load()
    except KernelUnavailable as reason:
        pytest.skip(str(reason))


pytestmark = pytest.mark.slow

ODD: dict[str, Any] = {
    "hidden_size": 40,
    "head_dim": 20,
    "num_heads": 5,
    "num_kv_heads": 1,
    "intermediate_size": 72,
    "vocab_size": 101,
    "max_positions": 300,
}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "qwen2, whose queries, keys and values have biases": {"family": "qwen2"},
    "llama": {"family": "llama"},
    "llama with biases and a head of its own": {"family": "llama", "attention_bias": True, "tied_embeddings": False},
    "scaled rotary frequencies": {"family": "llama", "rope_scaling": RopeScaling(8.0, 1.0, 4.0, 32)},
    "odd sizes": ODD,
    "odd sizes with biases": ODD | {"family": "qwen2"},
    "sizes smaller than a vector": {"hidden_size": 6, "head_dim": 2, "intermediate_size": 3, "vocab_size": 5},
    "no groups": ODD | {"num_heads": 6, "num_kv_heads": 6, "head_dim": 10},
    "groups larger than a tile": ODD | {"num_heads": 110, "head_dim": 4},
    "wide heads": {"head_dim": 144},
    "heads of whole panels": {"head_dim": 128, "num_heads": 6},
    "one layer": {"num_layers": 1},
    "a wide model": {"hidden_size": 576, "head_dim": 64, "num_heads": 9, "num_kv_heads": 3, "intermediate_size": 1000},
}


def decoder_of(**changes: Any) -> Decoder:
    decoder = Decoder(replace(TINY, **changes))
    randomise(decoder)
    with torch.no_grad():
        decoder.flat *= min(1.0, (16 / decoder.architecture.hidden_size) ** 0.5)  # so that logits stay small
    return decoder


def prompts_of(architecture: Architecture, lengths: list[int], seed: int = 0) -> list[list[int]]:
    draw = np.random.default_rng(seed)
    return [draw.integers(0, architecture.vocab_size, length).tolist() for length in lengths]


def assert_close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours.log_softmax(-1), theirs.log_softmax(-1), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("changes", ARCHITECTURES.values(), ids=ARCHITECTURES)
@pytest.mark.parametrize("threads", [1, 3])
def test_every_architecture_is_computed_as_torch_does(changes: dict[str, Any], threads: int) -> None:
    decoder = decoder_of(**changes)
    ours, theirs = DecoderRunner(decoder, kernel="native"), DecoderRunner(decoder, kernel="torch")
    prompts = prompts_of(decoder.architecture, [1, 5, 70, 150, 33, 64, 65, 129])
    with forced_threads(threads):
        logits = ours.prefill(range(len(prompts)), prompts)
    assert_close(logits, theirs.prefill(range(len(prompts)), prompts))
    for step in range(4):
        ids = [(7 * row + step) % decoder.architecture.vocab_size for row in range(len(prompts))]
        places = [len(prompt) + step for prompt in prompts]
        with forced_threads(threads):
            logits = ours.decode(ids, places)
        assert_close(logits, theirs.decode(ids, places))


class forced_threads:  # noqa: N801  (reads as a sentence)
    """Even a small step is computed by that many."""

    def __init__(self, threads: int, by_rows: bool | None = None) -> None:
        self._threads, self._by_rows = threads, by_rows

    def __enter__(self) -> None:
        self._patch = pytest.MonkeyPatch()
        self._patch.setattr(kernel_module, "ONE_THREAD_FLOPS", 0)
        self._patch.setattr(kernel_module, "ONE_THREAD_DRAW", 0)
        if self._by_rows is not None:
            self._patch.setattr(kernel_module, "ROWS_PARAMETERS", 10**12 if self._by_rows else 0)
        self._before = torch.get_num_threads()
        torch.set_num_threads(self._threads)

    def __exit__(self, *error: object) -> None:
        torch.set_num_threads(self._before)
        self._patch.undo()


@pytest.mark.parametrize("changes", [{}, ODD, {"num_heads": 9, "num_kv_heads": 3, "head_dim": 64}])
def test_logits_do_not_depend_on_what_else_is_computed(changes: dict[str, Any]) -> None:
    """To the bit: not on other rows, pieces, shared prefixes, threads or how these share the work."""
    decoder = decoder_of(**changes)
    prefix = prompts_of(decoder.architecture, [140])[0]
    prompts = [prefix + more for more in prompts_of(decoder.architecture, [1, 2, 30, 7, 64, 3, 5, 9, 11, 4, 2, 8, 90])]
    alone = []
    for prompt in prompts:
        runner = DecoderRunner(decoder, kernel="native", prefix_bytes=0)
        alone.append(torch.cat([runner.prefill([0], [prompt]), runner.decode([3], [len(prompt)])]))
    for threads, by_rows, prefix_bytes in [
        (1, True, 0),
        (2, True, None),
        (3, True, 0),
        (2, False, 0),
        (4, False, None),
    ]:
        runner = DecoderRunner(decoder, kernel="native", prefix_bytes=prefix_bytes)
        with forced_threads(threads, by_rows):
            first = runner.prefill(range(len(prompts)), prompts)
            second = runner.decode([3] * len(prompts), [len(prompt) for prompt in prompts])
        assert bool(runner._shared.of(len(prompts))) is True
        for row, expected in enumerate(alone):
            assert torch.equal(torch.stack([first[row], second[row]]), expected)


@pytest.mark.parametrize("changes", [{}, {"hidden_size": 64, "intermediate_size": 200}])
def test_logprobs_are_as_near_to_exact_ones_as_those_of_torch(changes: dict[str, Any]) -> None:
    decoder = decoder_of(**changes)
    exact = Decoder(decoder.architecture, decoder.flat.double())
    prompts = prompts_of(decoder.architecture, [50] * 20)
    runners = [
        DecoderRunner(decoder, kernel="native"),
        DecoderRunner(decoder, kernel="torch"),
        DecoderRunner(exact, dtype=torch.float64, kernel="torch"),
    ]
    ours, theirs, truth = (runner.prefill(range(20), prompts).double().log_softmax(-1) for runner in runners)
    assert (ours - truth).abs().mean() <= 1.2 * (theirs - truth).abs().mean()


def test_bfloat16_weights_are_those_of_a_rounded_model() -> None:
    for changes in ({}, ODD | {"family": "qwen2"}):
        decoder = decoder_of(**changes)
        rounded = Decoder(decoder.architecture, decoder.flat.bfloat16().float())
        ours = DecoderRunner(decoder, dtype=torch.bfloat16, kernel="native")
        theirs = DecoderRunner(rounded, kernel="torch")
        prompts = prompts_of(decoder.architecture, [3, 40, 100])
        assert_close(*(runner.prefill(range(3), prompts) for runner in (ours, theirs)))
        assert_close(*(runner.decode([1, 2, 3], [3, 40, 100]) for runner in (ours, theirs)))
        assert ours.decode([1], [4]).dtype == torch.float32


def test_weights_that_are_no_numbers_stay_none_in_bfloat16() -> None:
    decoder = decoder_of()
    with torch.no_grad():
        decoder.flat[:] = torch.nan
    runner = DecoderRunner(decoder, dtype=torch.bfloat16, kernel="native")
    assert runner.prefill([0], [[1, 2]]).isnan().all()


@pytest.mark.parametrize(("token", "place"), [(272, 15), (-1, 15), (2**40, 15), (1, 16), (1, -1)])
def test_tokens_and_positions_that_the_model_lacks_are_refused(token: int, place: int) -> None:
    runner = DecoderRunner(decoder_of(max_positions=16), kernel="native")
    runner.prefill([0], [[*range(15)]])
    with pytest.raises(ValueError, match=r"tokens must lie in \[0, 272\) and positions in \[0, 16\), got token"):
        runner.decode([token], [place])
    runner.reset()
    assert runner.prefill([0], [[1, 2, 3]]).isfinite().all()


def test_the_last_position_is_computed_and_nothing_is_too() -> None:
    decoder = decoder_of(**ODD)
    ours, theirs = DecoderRunner(decoder, kernel="native"), DecoderRunner(decoder, kernel="torch")
    (prompt,) = prompts_of(decoder.architecture, [299])
    assert_close(*(runner.prefill([0], [prompt]) for runner in (ours, theirs)))
    assert_close(*(runner.decode([1], [299]) for runner in (ours, theirs)))
    nothing = torch.empty(0, dtype=torch.int64)
    assert ours.forward(nothing, nothing, []).shape == (0, 101)


def test_a_decoder_without_layers_is_an_embedding_and_a_head() -> None:
    decoder = Decoder(replace(TINY, num_layers=0))
    with torch.no_grad():
        decoder.flat.normal_(generator=torch.Generator().manual_seed(0))
    kernel = NativeKernel(decoder)
    kernel.refresh()
    cache = kv_cache.KeyValueCache(kv_cache.CacheShape(0, 2, 8, torch.float32), 4096)
    cache.put(0, 3)
    nothing = torch.empty(0, dtype=torch.int64)
    logits = kernel.logits(cache, nothing, nothing, [Piece([0], [5, 6], 0, 2)], [])
    normed = torch.nn.functional.rms_norm(decoder.embedding[6], (16,), decoder.final_norm, TINY.norm_eps)
    torch.testing.assert_close(logits[0], decoder.head @ normed, atol=1e-4, rtol=1e-4)


def test_models_that_it_cannot_compute_are_refused_with_the_remedy() -> None:
    for decoder, dtype in (
        (Decoder(replace(TINY, value_head=True)), torch.float32),
        (Decoder(TINY, decoder_of().flat.double()), torch.float32),
        (decoder_of(), torch.float16),
    ):
        with pytest.raises(KernelUnavailable, match=r"the native kernel .*; use rollout.kernel=torch"):
            DecoderRunner(decoder, dtype=dtype, kernel="native")


def test_weights_that_were_prepared_are_those_that_are_packed_after_the_swap() -> None:
    waiting, prepared = (DecoderRunner(decoder_of(**ODD), kernel="native") for _ in range(2))
    assert prepared.kernel.fits_twice
    for factor in (1.3, 0.7, 1.1):  # the memory of each is the next one's
        for runner in (waiting, prepared):
            runner.prefill([0], [[1, 2, 3]])
        new = [(tensor.detach(), tensor.detach() * factor) for _, tensor in prepared.named_weights()]
        made = prepared.prepare(new)
        assert torch.equal(prepared.decode([5], [3]), waiting.decode([5], [3])), "the present weights count"
        for tensor, value in new:
            tensor.copy_(value)
        prepared.adopt(made)
        waiting.decoder.flat.detach().mul_(factor)
        assert torch.equal(prepared.prefill([0], [[4, 5]]), waiting.prefill([0], [[4, 5]]))


# ------------------------------------------------------------------------------------------------------------- drawing


def params_of(rows: list[tuple[float, float, int, int]]) -> SamplingParams:
    return SamplingParams.of_rows(rows)


@pytest.mark.parametrize("vocab", [1, 2, 15, 16, 17, 101, 256, 257, 5000])
@pytest.mark.parametrize("threads", [1, 2])
def test_tokens_are_drawn_as_the_sampler_does(vocab: int, threads: int) -> None:
    kernel = NativeKernel(decoder_of(vocab_size=vocab))
    generator = torch.Generator().manual_seed(vocab)
    logits = 3 * torch.randn(64, vocab + 5, generator=generator)[:, :vocab]
    logits[:8] -= 1000.0
    logits[8:12, : vocab // 2] = -torch.inf
    temperatures = [1.0, 0.7, 2.0, 0.0, 1e-4, 1e30]
    params = params_of([(temperatures[row % 6], 1.0, 0, row * 7919) for row in range(64)])
    counts = np.arange(64, dtype=np.uint64)
    with forced_threads(threads):
        tokens, logprobs, _ = kernel.sample(logits, params, counts)
    expected, expected_logprobs, _ = sample(logits.contiguous(), params, counts)
    exact = (logits.double() / params.temperatures[:, None]).log_softmax(-1)
    for row in range(64):
        if tokens[row] != expected[row]:  # only where the point is on the border of the two
            passed = exact[row].exp().cumsum(0)[min(tokens[row], expected[row])]
            point = uniforms(params.seeds, counts)[row]
            assert abs(float(passed - point)) < 1e-5
            assert vocab > 2
    np.testing.assert_allclose(
        logprobs, exact[torch.arange(64), torch.tensor(tokens)], atol=2e-6, rtol=1e-6, err_msg="as exact as can be"
    )
    assert sum(a != b for a, b in zip(tokens, expected, strict=True)) <= 1
    assert len(expected_logprobs) == len(logprobs)


@pytest.mark.parametrize(
    "row",
    [
        [torch.nan] * 40,
        [torch.nan, *[1.0] * 39],
        [*[1.0] * 39, torch.nan],
        [torch.inf, *[1.0] * 39],
        [-torch.inf] * 40,
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 1.0, 0.5])
def test_a_row_without_a_token_that_can_be_drawn_is_noticed_and_no_other(row: list[float], temperature: float) -> None:
    kernel = NativeKernel(decoder_of(vocab_size=40))
    logits = torch.zeros(3, 40)
    logits[1] = torch.tensor(row)
    tokens, logprobs, _ = kernel.sample(logits, params_of([(temperature, 1.0, 0, 1)] * 3), [0, 1, 2])
    assert not logprobs[1] > -np.inf
    assert all(0 <= token < 40 for token in tokens)
    assert logprobs[0] == logprobs[2] == pytest.approx(-np.log(40))


def test_tokens_without_probability_are_never_drawn() -> None:
    kernel = NativeKernel(decoder_of(vocab_size=600))
    logits = torch.full((2000, 600), -torch.inf)
    logits[:, 599] = 0.0
    logits[1000:, 17] = -80.0
    tokens, _, _ = kernel.sample(logits, params_of([(1.0, 1.0, 0, seed) for seed in range(2000)]), [0] * 2000)
    assert set(tokens) == {599}


def test_rows_with_limits_are_drawn_by_the_sampler_and_the_others_as_if_alone() -> None:
    kernel = NativeKernel(decoder_of(vocab_size=101))
    logits = torch.randn(6, 101, generator=torch.Generator().manual_seed(1))
    rows = [(1.0, 1.0, 0, 1), (1.0, 0.3, 0, 2), (0.8, 1.0, 0, 3), (1.0, 1.0, 2, 4), (0.0, 1.0, 0, 5), (1.0, 1.0, 0, 6)]
    banned = torch.zeros(6, 101, dtype=torch.bool)
    banned[5, 50:] = True
    params, counts = params_of(rows), np.arange(6, dtype=np.uint64)
    tokens, logprobs, sets = kernel.sample(logits, params, counts, banned)
    limited, limited_logprobs, limited_sets = sample(logits, params, counts, banned)
    for row in (1, 3, 5):
        assert (tokens[row], logprobs[row]) == (limited[row], limited_logprobs[row])
    for row in (0, 2, 4):
        alone = kernel.sample(logits[row : row + 1], params_of(rows[row : row + 1]), counts[row : row + 1])
        assert ([tokens[row]], [logprobs[row]], {}) == alone
    assert tokens == limited
    assert tokens[5] < 50
    assert {row: left.tolist() for row, left in sets.items()} == {
        row: left.tolist() for row, left in limited_sets.items()
    }
    assert sets.keys() == {1, 3}


# ------------------------------------------------------------------------------------------------------- any schedule


SCHEDULE = st.lists(
    st.one_of(
        st.tuples(st.just("join"), st.integers(0, 2), st.integers(1, 40), st.integers(1, 9), st.integers(1, 3)),
        st.tuples(st.just("piece"), st.integers(0, 2), st.integers(20, 40), st.integers(1, 9), st.integers(1, 19)),
        st.tuples(st.just("decode"), st.integers(1, 12)),
        st.tuples(st.just("leave"), st.integers(0, 9)),
        st.tuples(st.just("swap")),
        st.tuples(st.just("reset")),
    ),
    min_size=1,
    max_size=14,
)


class Both:
    """Drives a native and a torch runner through the same steps, and compares their log-probs."""

    def __init__(self, changes: dict[str, Any]) -> None:
        self.decoder = decoder_of(**changes)
        self.runners = [
            DecoderRunner(self.decoder, kernel=kernel, prefix_bytes=40_000) for kernel in ("native", "torch")
        ]
        self.ids: list[list[int]] = []
        draw = np.random.default_rng(0)
        self.stems = draw.integers(0, self.decoder.architecture.vocab_size, (3, 40)).tolist()

    def forward(self, pieces: list[Piece]) -> None:
        """The last token of every row is computed now, as in the engine."""
        rows = len(self.ids)
        if not (rows or pieces):
            return
        last = torch.tensor([ids[-1] for ids in self.ids], dtype=torch.int64)
        places = torch.tensor([len(ids) - 1 for ids in self.ids], dtype=torch.int64)
        logits = [runner.forward(last, places, pieces) for runner in self.runners]
        assert len(logits[0]) == rows + sum(piece.last for piece in pieces)
        assert_close(*logits)
        drawn = logits[1].argmax(-1).tolist()
        for ids, token in zip(self.ids, drawn, strict=False):
            ids.append(token)
        at = rows
        for piece in pieces:
            if piece.last:
                self.ids += [[*piece.ids, drawn[at]] for _ in piece.rows]
                at += 1

    def join(self, stem: int, kept: int, extra: int, rows: int, cut: int | None = None) -> None:
        """A prompt in one piece, or in two; with several rows, equal ones."""
        prompt = [*self.stems[stem][:kept], *range(extra)]
        known = [runner.cached_tokens(prompt) for runner in self.runners]
        assert known[0] == known[1]
        start = known[0]
        first = len(self.ids)
        if cut is not None and start < cut < len(prompt):
            self.forward([Piece([first], prompt, start, cut)])
            self.forward([Piece([first], prompt, cut, len(prompt), continued=True)])
        else:
            self.forward([Piece([*range(first, first + rows)], prompt, start, len(prompt))])

    def leave(self, row: int) -> None:
        if not self.ids:
            return
        row, last = row % len(self.ids), len(self.ids) - 1
        for runner in self.runners:
            runner.remember(row, self.ids[row][:-1])
            if row != last:
                runner.move(last, row, len(self.ids[last]))
        moved = self.ids.pop()
        if row != last:
            self.ids[row] = moved

    def swap(self) -> None:
        with torch.no_grad():
            self.decoder.flat *= 1.02
        self.ids = []

    def reset(self) -> None:
        for runner in self.runners:
            runner.reset()
        self.ids = []


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(schedule=SCHEDULE, shape=st.sampled_from(["qwen3", "odd sizes", "no groups"]), threads=st.sampled_from([1, 2]))
def test_any_schedule_gives_the_logprobs_that_torch_gives(
    schedule: list[tuple[Any, ...]], shape: str, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "LEAST_SAVED", 1)
    monkeypatch.setattr(kv_cache, "SMALLEST_POOL", 8)
    monkeypatch.setattr(decoder_runner, "SHORTEST_PREFIX", 4)
    both = Both(ARCHITECTURES[shape])
    with forced_threads(threads):
        for kind, *numbers in schedule:
            if kind == "join" and len(both.ids) < 8:
                both.join(*numbers)
            elif kind == "piece" and len(both.ids) < 8:
                stem, kept, extra, cut = numbers
                both.join(stem, kept, extra, 1, cut)
            elif kind == "decode":
                for _ in range(numbers[0]):
                    both.forward([])
            elif kind == "leave":
                both.leave(*numbers)
            elif kind == "swap":
                both.swap()
            elif kind == "reset":
                both.reset()


def test_structures_are_as_large_as_those_of_the_library() -> None:
    """A field that one side lacks would shift all that follow."""
    sizes = {"Layer": kernel_module._LayerFields, "Model": kernel_module._ModelFields}
    sizes |= {"Step": kernel_module._StepFields, "Draw": kernel_module._DrawFields}
    handle = load().handle
    assert [ctypes.sizeof(each) for each in sizes.values()] == [
        handle.areal_size_of(number) for number in range(len(sizes))
    ]
