"""Runs inside vLLM's worker processes: what vLLM itself does not do, or does not do on a CPU.

vLLM 0.32 has three faults that this mends. On a CPU, after new weights were loaded, a head that shares its weights with
the embedding computes with the old ones; and a long prompt with a seed ends the server. Where it takes adapters,
log-probs of a prompt end the server if any other request is in the same step.

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

        if self.model_runner.vllm_config.load_config.load_format == "dummy":
            raise RuntimeError("an adapter must be added to the model that it belongs to, and vLLM started without it")
        (number,) = self.list_loras()
        return bool(self.add_lora(LoRARequest(name, number, path, load_inplace=True)))

    def can_read(self, path: str, content: str) -> bool:
        """Whether this worker sees the files of whoever asks."""
        try:
            return Path(path).read_text() == content
        except OSError:
            return False

    def report_drawn_distribution(self, choices: int) -> bool:
        """True if this worker's log-probs are those of what it draws from; what else it needs to draw is mended too.

        `choices`: of how many tokens a request may ask for log-probs.

        vLLM masks logits by the grammar before its sampler, which then masks them by min_tokens and its bias, divides
        by the temperature and masks by top_k and top_p: processed log-probs are taken after all of that. Greedy ones
        are divided by 1. Raises for a server that was started to report others.
        """
        runner = self.model_runner
        mode = runner.sampler.logprobs_mode
        if mode != "processed_logprobs":
            raise RuntimeError(f"vLLM must run with --logprobs-mode processed_logprobs, got {mode}")
        most = runner.model_config.max_logprobs
        if 0 <= most < choices:
            raise RuntimeError(f"vLLM must run with a --max-logprobs of at least {choices}, got {most}")
        if runner.device.type == "cpu" and not getattr(runner, "is_seeded_on_cpu", False):
            runner.sample_tokens, runner.is_seeded_on_cpu = _seeded_on_cpu(runner), True
        if runner.lora_config and not getattr(runner, "scores_adapted_prompts", False):
            runner._get_prompt_logprobs_dict, runner.scores_adapted_prompts = _scoring_adapted_prompts(runner), True
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


def _scoring_adapted_prompts(runner: Any) -> Callable[..., dict[str, Any]]:
    """The runner's `_get_prompt_logprobs_dict` for a model with adapters.

    The head adds to each row of logits what the adapter of that row's request has for it, and knows whose each row is:
    in a step there is one for each token to be drawn. But the rows of a prompt are all of one request and as many as
    the prompt has tokens. With one request in the step, its adapter is taken for all of them; with several, the shapes
    do not fit, and the server would end. So the head is told here whose rows they are.
    """
    prompt_logprobs, compute_logits = runner._get_prompt_logprobs_dict, runner.model.compute_logits
    batch = runner.input_batch

    def prompt_logprobs_adapted(hidden_states: Any, num_scheduled_tokens: dict[str, int]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        asked = runner.num_prompt_logprobs
        for request in [each for each in asked if each in num_scheduled_tokens]:
            runner.num_prompt_logprobs = {request: asked[request]}  # it loses those that are complete
            runner.model.compute_logits = adapted_as(request)
            try:
                found |= prompt_logprobs(hidden_states, num_scheduled_tokens)
            finally:
                if request not in runner.num_prompt_logprobs:
                    del asked[request]
                runner.num_prompt_logprobs, runner.model.compute_logits = asked, compute_logits
        return found

    def adapted_as(request: str) -> Callable[[Any], Any]:
        number = int(batch.request_lora_mapping[batch.req_id_to_index[request]])
        adapters = {batch.lora_id_to_lora_request[number]} if number else set()

        def compute(rows: Any) -> Any:
            whose = (number,) * len(rows)
            runner._set_active_loras(whose, whose, adapters)
            return compute_logits(rows)

        return compute

    return prompt_logprobs_adapted
