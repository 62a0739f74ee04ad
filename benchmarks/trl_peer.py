"""TRL's GRPOTrainer on a given checkpoint and tasks; run by benchmarks.train_step in an environment that has TRL.

`python trl_peer.py MODEL_DIR TASKS.jsonl '{"steps": 40, …}'` prints one JSON object on its last line. Imports
nothing of areal, which is not installed there.
"""

import json
import sys
import time
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class Clock(TrainerCallback):
    """When each step ended, and the reward of its samples."""

    def __init__(self) -> None:
        self.ends: list[float] = []
        self.rewards: list[float] = []

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self.ends.append(time.monotonic())

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.ends.append(time.monotonic())

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **kwargs: Any) -> None:
        if "reward" in logs:
            self.rewards.append(float(logs["reward"]))


def right(completions: list[Any], answer: list[str], **kwargs: Any) -> list[float]:
    texts = [completion[0]["content"] for completion in completions]
    return [float(text.strip() == wanted) for text, wanted in zip(texts, answer, strict=True)]


def main(model: str, tasks: str, settings: dict[str, Any]) -> None:
    torch.set_num_threads(settings["threads"])
    with open(tasks, encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    data = Dataset.from_list([{"prompt": row["messages"], "answer": row["answer"]} for row in rows])
    clock = Clock()
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=right,
        train_dataset=data,
        processing_class=AutoTokenizer.from_pretrained(model),
        callbacks=[clock],
        args=GRPOConfig(
            output_dir=settings["output_dir"],
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            per_device_train_batch_size=settings["prompts"] * settings["samples"],
            num_generations=settings["samples"],
            max_completion_length=settings["max_new_tokens"],
            max_steps=settings["steps"],
            learning_rate=settings["lr"],
            adam_beta2=0.99,
            warmup_steps=10,
            lr_scheduler_type="constant_with_warmup",
            max_grad_norm=1.0,
            beta=0.0,
            epsilon=0.2,
            epsilon_high=0.28,
            scale_rewards="none",
            loss_type="dapo",
            temperature=1.0,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            seed=1,
        ),
    )
    trainer.train()
    steps = [end - begin for begin, end in zip(clock.ends, clock.ends[1:], strict=False)]
    print(json.dumps({"step_seconds": steps, "rewards": clock.rewards}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], json.loads(sys.argv[3]))
