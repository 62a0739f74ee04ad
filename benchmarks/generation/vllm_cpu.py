"""vLLM's CPU build in one process, eager or compiled, with its own prefix caching."""

from job import measure, read_job
from vllm import LLM, SamplingParams


def main() -> None:
    job = read_job()
    llm = LLM(
        model=job["model"],
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=2048,
        max_num_seqs=128,
        enforce_eager=not job["compiled"],
        enable_prefix_caching=True,
        distributed_executor_backend="uni",
        disable_log_stats=True,
    )

    def generate(prompts: list[list[int]], new: int) -> int:
        settings = SamplingParams(temperature=1.0, max_tokens=new, ignore_eos=True, detokenize=False)
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], settings, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    measure(job, generate)


if __name__ == "__main__":
    main()
