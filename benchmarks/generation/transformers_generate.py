"""transformers: `generate` on a batch, or its continuous batching (`continuous: true`)."""

from typing import Any

import torch
from job import measure, read_job
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

PAGE = 32
BATCH_TOKENS = 512


def main() -> None:
    job = read_job()
    torch.set_num_threads(job["threads"])
    model: Any = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32).eval()

    def settings(new: int) -> GenerationConfig:
        sampled = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
        # -1 is never drawn, so nothing ends early; None would be replaced by the model's own setting.
        return GenerationConfig(max_new_tokens=new, min_new_tokens=new, eos_token_id=-1, pad_token_id=0, **sampled)

    def batch(prompts: list[list[int]], new: int) -> int:
        ids = torch.tensor(prompts)
        with torch.inference_mode():
            out = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings(new))
        return int(out[:, ids.shape[1] :].numel())

    def continuous(prompts: list[list[int]], new: int) -> int:
        outputs = model.generate_batch(prompts, settings(new), continuous_batching_config=limits)
        return sum(len(output.generated_tokens) for output in outputs.values())

    # By default it takes most of the memory for its cache.
    pages = max(one["concurrency"] * (2 + (one["prompt"] + one["new"]) // PAGE) for one in job["cases"])
    limits = ContinuousBatchingConfig(page_size=PAGE, num_blocks=pages + 8, max_batch_tokens=BATCH_TOKENS)
    measure(job, continuous if job["continuous"] else batch)


main()
