"""Does generation go on while the trainer trains? The same steps with rollout.max_head_offpolicyness (η) 0 and 2.

On the built-in model: RLVRWorkflow and an OpenAI-SDK agent, both bound by the processors, and an agent that first waits
0.3 s for a tool, bound by waiting. η = 2 is compared with η = 0 of the same run. Overlap is the share of training time
in which the engine produced tokens too, from recorded intervals (decode steps less than 5 ms apart count as one).
"""

import asyncio
import sys
import tempfile
from pathlib import Path
from typing import Any

from areal.api.cli_args import GRPOConfig, load_expr_config
from areal.workflow.openai.math_agent import MathAgent
from benchmarks.report import Aim, main

TOOL_SECONDS = 0.3
EXAMPLE = Path(__file__).parent.parent / "examples" / "agent_workflow" / "config.yaml"


class SlowToolAgent(MathAgent):
    """Waits for a tool before it asks."""

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
        await asyncio.sleep(TOOL_SECONDS)
        return await super().run(data, **extra_kwargs)


def train(agent: str, staleness: int, steps: int, *overrides: str) -> dict[str, Any]:
    """One run of the example; returns its summary."""
    from areal import PPOTrainer

    with tempfile.TemporaryDirectory() as output_dir:
        words = [
            f"--config={EXAMPLE}",
            f"output_dir={output_dir}",
            f"total_train_steps={steps}",
            f"rollout.max_head_offpolicyness={staleness}",
            "evaluator.freq_steps=null",
            "evaluator.greedy=false",
            "valid_dataset.path=",
            *overrides,
        ]
        config, _ = load_expr_config(words, GRPOConfig)
        with PPOTrainer(config) as trainer:
            summary = trainer.train(workflow=agent).summary
    print(
        f"{agent.rsplit('.', 1)[1]} η={staleness}: {summary['seconds']:.1f} s, overlap {summary['overlap']:.2f}",
        file=sys.stderr,
    )
    return summary


def run() -> tuple[dict[str, Any], list[Aim]]:
    plain, slow = "areal.workflow.openai.math_agent.MathAgent", "benchmarks.overlap.SlowToolAgent"
    direct = "areal.workflow.RLVRWorkflow"
    small = ("train_dataset.batch_size=4",)
    scored = ("reward_fn=areal.reward.exact_match_reward",)
    runs = {
        "direct_0": train(direct, 0, 40, *scored),
        "direct_2": train(direct, 2, 40, *scored),
        "plain_0": train(plain, 0, 40),
        "plain_2": train(plain, 2, 40),
        "slow_tool_0": train(slow, 0, 30, *small),
        "slow_tool_2": train(slow, 2, 30, *small),
    }
    seconds = {name: summary["seconds"] for name, summary in runs.items()}
    overlaps = {name: summary["overlap"] for name, summary in runs.items()}
    ratio = seconds["slow_tool_2"] / seconds["slow_tool_0"]
    aims = [
        Aim.at_least("share of training time with tokens produced, RLVRWorkflow, η = 2", overlaps["direct_2"], 0.7),
        Aim.at_least("share of training time with tokens produced, SDK agent, η = 2", overlaps["plain_2"], 0.7),
        Aim.at_most("the same at η = 0, the larger of both", max(overlaps["direct_0"], overlaps["plain_0"]), 0.0),
        Aim.at_most("time of η = 2 over η = 0, agent that awaits a 0.3 s tool", ratio, 0.7),
    ]
    speedups = {name: seconds[f"{name}_0"] / seconds[f"{name}_2"] for name in ("direct", "plain", "slow_tool")}
    return {"seconds": seconds, "overlap": overlaps, "speedup": speedups}, aims


if __name__ == "__main__":
    main(__doc__ or "", run)
