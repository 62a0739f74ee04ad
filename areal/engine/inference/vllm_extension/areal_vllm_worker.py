"""Runs inside vLLM's worker processes: what vLLM itself does not do, or does not do on a CPU.

vLLM reports log-probs either before it divides logits by the temperature, or after it has masked what top_p, top_k,
min_tokens and a grammar exclude. A trainer recomputes what lies between: divided by the temperature, nothing masked.
So that is what this extension makes vLLM report.

On a CPU vLLM 0.32 has two faults that it mends: after new weights were loaded, a head that shares its weights with the
embedding computes with the old ones; and a long prompt with a seed ends the server.

vLLM's interpreter, which has no `areal`, imports this file from its directory by PYTHONPATH. `--worker-extension-cls`
names the class, and `areal.engine.inference.vllm` calls its methods through `/collective_rpc`.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy for vLLM, which divides by 1 then."""


class ArealWorker:
    """vLLM makes it a base class of its worker, whose own attributes these are."""

    model_runner: Any
    reload_weights: Callable[..., None]

    def load_published_weights(self, weights_path: str) -> None:
        """Use the weights of a directory from now on."""
        loading = self.model_runner.vllm_config.load_config
        if loading.load_format == "dummy":  # it started without weights, and could not read any that way
            loading.load_format = "auto"
        self.reload_weights(weights_path=weights_path)
        for layer in self.model_runner.get_model().modules():
            if type(layer).__name__ == "ParallelLMHead" and hasattr(layer, "cpu_linear"):
                layer.quant_method.process_weights_after_loading(layer)  # packs the weights for the CPU

    def can_read(self, path: str, content: str) -> bool:
        """Whether this worker sees the files of whoever asks."""
        try:
            return Path(path).read_text() == content
        except OSError:
            return False

    def report_whole_distribution(self) -> bool:
        """Changes what this worker reports; True if it does, or did before. Raises for a runner that it does not know.

        Tensor shapes: B sequences, V vocabulary.
        """
        runner = self.model_runner
        if getattr(runner, "reports_whole_distribution", False):
            return True
        sampler = runner.sampler
        sample_tokens = _seeded_on_cpu(runner) if runner.device.type == "cpu" else runner.sample_tokens
        draw = sampler.forward
        if sampler.logprobs_mode != "raw_logprobs":
            raise RuntimeError(f"vLLM must run with --logprobs-mode raw_logprobs, got {sampler.logprobs_mode}")
        unmasked: list[Tensor] = []

        def sample_tokens_unmasked(grammar_output: Any) -> Any:
            """A grammar's mask is written into the logits, so they are kept before that."""
            state = runner.execute_model_state
            if grammar_output is not None and state is not None:
                unmasked.append(state.logits.clone())
            try:
                return sample_tokens(grammar_output)
            finally:
                unmasked.clear()

        def draw_and_report(logits: Tensor, sampling_metadata: Any, **options: Any) -> Any:
            whole_b_v = unmasked[0] if unmasked else logits

            def whole_logprobs(_: Tensor) -> Tensor:
                scaled_b_v = whole_b_v.float()
                temperature_b = sampling_metadata.temperature
                if temperature_b is not None:  # None = all are greedy
                    scaled_b_v = scaled_b_v / temperature_b.where(temperature_b >= GREEDY_BELOW, 1.0)[:, None]
                return scaled_b_v.log_softmax(dim=-1)

            sampler.compute_logprobs = whole_logprobs  # hides the static method of the same name
            try:
                return draw(logits, sampling_metadata, **options)
            finally:
                del sampler.compute_logprobs

        runner.sample_tokens, sampler.forward = sample_tokens_unmasked, draw_and_report
        runner.reports_whole_distribution = True
        return True


def _seeded_on_cpu(runner: Any) -> Callable[[Any], Any]:
    """The runner's `sample_tokens` for prompts that are computed in several steps.

    vLLM draws a token after each of these steps, throws it away, and winds back the generator of the request's seed. A
    CPU's generators cannot do that, and the server would end. So such requests do without theirs in these steps.
    """
    sample_tokens, batch = runner.sample_tokens, runner.input_batch

    def sample_tokens_seeded(grammar_output: Any) -> Any:
        unfinished = runner.discard_request_mask.np[: batch.num_reqs].nonzero()[0].tolist()
        kept = {row: batch.generators.pop(row) for row in unfinished if row in batch.generators}
        try:
            return sample_tokens(grammar_output)
        finally:
            batch.generators.update(kept)

    return sample_tokens_seeded
