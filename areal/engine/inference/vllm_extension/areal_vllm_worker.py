"""Runs inside vLLM's worker processes: what vLLM itself does not do, or does not do on a CPU.

On a CPU vLLM 0.32 has two faults that this mends: after new weights were loaded, a head that shares its weights with
the embedding computes with the old ones; and a long prompt with a seed ends the server.

vLLM's interpreter, which has no `areal`, imports this file from its directory by PYTHONPATH. `--worker-extension-cls`
names the class, and `areal.engine.inference.vllm` calls its methods through `/collective_rpc`.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any


class ArealWorker:
    """vLLM makes it a base class of its worker, whose own attributes these are."""

    model_runner: Any
    reload_weights: Callable[..., None]
    add_lora: Callable[[Any], bool]
    list_loras: Callable[[], set[int]]

    def load_published_weights(self, weights_path: str) -> None:
        """Use the weights of a directory from now on."""
        loading = self.model_runner.vllm_config.load_config
        if loading.load_format == "dummy":  # it started without weights, and could not read any that way
            loading.load_format = "auto"
        self.reload_weights(weights_path=weights_path)
        for layer in self.model_runner.get_model().modules():
            if type(layer).__name__ == "ParallelLMHead" and hasattr(layer, "cpu_linear"):
                layer.quant_method.process_weights_after_loading(layer)  # packs the weights for the CPU

    def load_published_adapter(self, name: str, path: str) -> bool:
        """Replace the matrices of the one adapter that vLLM has by those of a directory; True if they are used."""
        from vllm.lora.request import LoRARequest

        (number,) = self.list_loras()
        return bool(self.add_lora(LoRARequest(name, number, path, load_inplace=True)))

    def can_read(self, path: str, content: str) -> bool:
        """Whether this worker sees the files of whoever asks."""
        try:
            return Path(path).read_text() == content
        except OSError:
            return False

    def report_drawn_distribution(self) -> bool:
        """True if this worker's log-probs are those of what it draws from; what else it needs to draw is mended too.

        vLLM masks logits by the grammar before its sampler, which then masks them by min_tokens and its bias, divides
        by the temperature and masks by top_k and top_p: processed log-probs are taken after all of that. Greedy ones
        are divided by 1. Raises for a server that was started to report others.
        """
        runner = self.model_runner
        mode = runner.sampler.logprobs_mode
        if mode != "processed_logprobs":
            raise RuntimeError(f"vLLM must run with --logprobs-mode processed_logprobs, got {mode}")
        if runner.device.type == "cpu" and not getattr(runner, "is_seeded_on_cpu", False):
            runner.sample_tokens, runner.is_seeded_on_cpu = _seeded_on_cpu(runner), True
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
