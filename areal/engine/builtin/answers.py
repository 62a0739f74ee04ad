"""What a model answers while it is being made: every prompt sampled once, at temperature 1."""

from collections.abc import Sequence
from typing import Any

from areal.engine.model_runner import ModelRunner
from areal.engine.sampler import Choices, sample


def sampled_answers(
    runner: ModelRunner,
    tokenizer: Any,
    prompts: Sequence[Sequence[int]],
    images: Sequence[tuple[bytes, ...]],
    max_tokens: int,
) -> list[str]:
    """The text of each answer, the same at every call; "" for one that has not ended by `max_tokens`."""
    choices = Choices.of([(1.0, 1.0, 0, seed) for seed in range(len(prompts))])
    outputs: list[list[int]] = [[] for _ in prompts]
    logits = runner.prefill(range(len(prompts)), prompts, images)
    for count in range(max_tokens):
        tokens, _ = sample(logits, choices, [count] * len(prompts))
        for output, token in zip(outputs, tokens, strict=True):
            output.append(token)
        logits = runner.decode(tokens, [len(prompt) + count for prompt in prompts])
    end = tokenizer.eos_token_id
    return [tokenizer.decode(output[: output.index(end)]) if end in output else "" for output in outputs]
