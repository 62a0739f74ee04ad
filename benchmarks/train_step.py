"""How fast is a training step, compared with what one would run instead? On the built-in model, all cores.

The step alone, in trained tokens per second: groups that share a prompt, and 8-turn conversations, packed as this
package does it against the same model in plain transformers with padded rows (same loss, same optimizer). End to end,
in samples per second and in reward after the same steps: RLVRWorkflow against TRL's GRPOTrainer (same checkpoint,
tasks, batch, group size, learning rate). Then the same run through an OpenAI-SDK agent, and where the processor time of
a sample goes, in the steady state: a shorter run, with its starts and its first samples, is subtracted. The shares of
the SDK and the proxy are measured by calls to an engine that costs nothing.
"""

import asyncio
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from areal.api.cli_args import GRPOConfig, load_expr_config
from areal.config.training import OptimizerConfig
from areal.dataset.builtin import TASKS
from areal.engine.model.architecture import read_architecture
from areal.engine.models import find_model
from areal.engine.training.engine import TokenBatch, TrainingEngine
from areal.engine.training.figures import Figures
from areal.engine.training.packing import Span
from benchmarks.instant import instant_proxy
from benchmarks.peers import outside_variables, peer_environment
from benchmarks.report import Aim, main

EXAMPLE = Path(__file__).parent.parent / "examples" / "agent_workflow" / "config.yaml"
TRL = ["torch==2.13.0", "trl==1.16.0", "transformers>=5.0"]
PROMPTS, SAMPLES, STEPS, LR, MAX_NEW_TOKENS = 32, 8, 60, 2e-4, 16
START_STEPS = 20
"""Of the shorter run: processes start, modules are loaded and caches filled in it as in the other."""
SAME_REWARD_STEPS = 10
"""Rewards are compared as means over this many steps."""


def group_spans(draw: np.random.Generator, vocabulary: int) -> list[Span]:
    """32 groups of 8 completions of 32 tokens, each group after a prompt of 96."""
    spans = []
    for group in range(32):
        prompt = draw.integers(0, vocabulary, 96)
        for _ in range(8):
            ids = np.concatenate((prompt, draw.integers(0, vocabulary, 32)))
            spans.append(Span(ids, np.arange(96, 128), group))
    return spans


def conversation_spans(draw: np.random.Generator, vocabulary: int) -> list[Span]:
    """16 conversations of 8 turns, a row per answer: 24 tokens of question and 16 of answer each."""
    spans = []
    for group in range(16):
        ids = draw.integers(0, vocabulary, 8 * 40)
        spans += [Span(ids[: 40 * turn], np.arange(40 * turn - 16, 40 * turn), group) for turn in range(1, 9)]
    return spans


def loss(logprobs: torch.Tensor, fields: dict[str, torch.Tensor]) -> tuple[torch.Tensor, Figures]:
    return -(logprobs * fields["weights"]).sum(), Figures()


def ours(model: Path, spans: list[Span]) -> Callable[[], None]:
    engine = TrainingEngine(read_architecture(model), OptimizerConfig(), total_steps=1000, directory=model)
    count = sum(len(span.asked) for span in spans)
    batch = TokenBatch(spans, torch.ones(count), {"weights": torch.full((count,), 1 / count)})
    return lambda: engine.train_batch(batch, loss) and None


def padded_transformers(model: Path, spans: list[Span]) -> Callable[[], None]:
    from transformers import AutoModelForCausalLM

    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=2e-4, fused=True)
    length = max(len(span.ids) for span in spans)
    ids = torch.zeros(len(spans), length, dtype=torch.long)
    attention, asked = torch.zeros_like(ids), torch.zeros_like(ids, dtype=torch.bool)
    for row, span in enumerate(spans):
        ids[row, : len(span.ids)] = torch.from_numpy(span.ids)
        attention[row, : len(span.ids)] = 1
        asked[row, span.asked] = True

    def step() -> None:
        optimizer.zero_grad()
        for rows in torch.arange(len(spans)).split(64):  # as many as fit a modest memory
            logits = policy(input_ids=ids[rows], attention_mask=attention[rows]).logits[:, :-1]
            logprobs = logits.log_softmax(-1).gather(2, ids[rows, 1:, None]).squeeze(2)
            (-(logprobs * asked[rows, 1:]).sum() / int(asked.sum())).backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()

    return step


def tokens_per_second(step: Callable[[], None], spans: list[Span], seconds: float = 6.0) -> float:
    """Trained tokens per second; the first step is not counted."""
    step()
    began, steps = time.monotonic(), 0
    while time.monotonic() - began < seconds:
        step()
        steps += 1
    return steps * sum(len(span.asked) for span in spans) / (time.monotonic() - began)


def step_alone(model: Path) -> dict[str, Any]:
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    vocabulary = read_architecture(model).vocab_size
    figures = {}
    for name, make in (("groups", group_spans), ("conversations", conversation_spans)):
        spans = make(np.random.default_rng(0), vocabulary)
        speeds = {
            kind: tokens_per_second(prepare(model, spans), spans)
            for kind, prepare in (("ours", ours), ("transformers_padded", padded_transformers))
        }
        figures[name] = {**speeds, "ratio": speeds["ours"] / speeds["transformers_padded"]}
        print(f"{name}: {figures[name]}", file=sys.stderr)
    return figures


def trl(model: Path, place: Path) -> dict[str, Any]:
    tasks = place / "tasks.jsonl"
    problems = islice(TASKS["sort-digits"].problems("train", 1), PROMPTS * STEPS)
    tasks.write_text("".join(json.dumps(problem.as_task()) + "\n" for problem in problems))
    settings = {
        "steps": STEPS,
        "prompts": PROMPTS,
        "samples": SAMPLES,
        "lr": LR,
        "max_new_tokens": MAX_NEW_TOKENS,
        "threads": len(os.sched_getaffinity(0)),
        "output_dir": str(place / "trl"),
    }
    python = peer_environment("trl", TRL) / "python"
    script = Path(__file__).with_name("trl_peer.py")
    done = subprocess.run(
        [python, script, model, tasks, json.dumps(settings)],
        env={**outside_variables(), "HF_HUB_OFFLINE": "1"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=900,
    )
    printed = json.loads(done.stdout.strip().split("\n")[-1])
    return end_to_end("TRL", printed["step_seconds"], printed["rewards"])


def areal(workflow: str, place: Path, *overrides: str, steps: int = STEPS) -> dict[str, Any]:
    from areal import PPOTrainer
    from areal.trainer.logs import read_metrics

    words = [
        f"--config={EXAMPLE}",
        f"output_dir={place}",
        f"trial_name={workflow.rsplit('.', 1)[1]}-{steps}",
        f"total_train_steps={steps}",
        f"train_dataset.batch_size={PROMPTS}",
        f"gconfig.n_samples={SAMPLES}",
        f"gconfig.max_new_tokens={MAX_NEW_TOKENS}",
        "actor.ppo_n_minibatches=1",
        "actor.algorithm=default",  # TRL's trainer makes no second pass for a proximal policy either
        f"actor.optimizer.lr={LR}",
        "actor.optimizer.lr_scheduler=constant",
        "rollout.max_concurrent_rollouts=512",
        "evaluator.freq_steps=null",
        "valid_dataset.path=",
        *overrides,
    ]
    config, _ = load_expr_config(words, GRPOConfig)
    with PPOTrainer(config) as trainer:
        result = trainer.train(workflow=workflow)
    rows = [row for row in read_metrics(result.run_dir) if "step_seconds" in row]
    # From one step to the next, as TRL's are counted: `step_seconds` leaves out what is shown and exported in between.
    between = np.diff([row["time_seconds"] for row in rows]).tolist()
    figures = end_to_end(workflow, between, [row["reward"] for row in rows])
    return {
        **figures,
        "cpu_seconds": result.summary["cpu_seconds"],
        "training_seconds": result.summary["training_seconds"],
    }


def steady_cpu(run: dict[str, Any], start: dict[str, Any]) -> dict[str, float]:
    """Processor seconds of a step by process: what a run of `STEPS` used beyond one of `START_STEPS`."""
    before = start["cpu_seconds"]
    return {name: (used - before[name]) / (STEPS - START_STEPS) for name, used in run["cpu_seconds"].items()}


def sample_costs(run: dict[str, Any], start: dict[str, Any]) -> dict[str, float]:
    """Processor time per sample in µs of a run through the SDK, by the part that used it."""
    costs = asyncio.run(call_costs())
    used = {name: 1e6 * seconds / (PROMPTS * SAMPLES) for name, seconds in steady_cpu(run, start).items()}
    workers = sum(cost for name, cost in used.items() if name.startswith("rollout worker"))
    return {
        "sdk": costs["sdk"] - costs["proxy"],
        "proxy": costs["proxy"],
        "rest_of_the_episode": workers - costs["sdk"],
        "engine": used["engine"],
        "trainer": used["driver"],
    }


async def call_costs() -> dict[str, float]:
    """Processor time of a call in µs: to the proxy without the SDK, and with it; 64 at once, the median of 12 rounds.

    As in a run, each call has a session and a client of its own, eight ask the same, and what was there before is
    frozen. The two take turns.
    """
    from openai import AsyncOpenAI

    proxy = await instant_proxy()

    def body(number: int) -> dict[str, Any]:
        return {"model": "default", "messages": [{"role": "user", "content": f"Sort {number}"}]}

    async def bare(session: Any, number: int) -> None:
        headers = {"authorization": f"Bearer {session.api_key}"}
        url = f"{session.base_url}/chat/completions"
        (await proxy.http_client.post(url, json=body(number), headers=headers)).raise_for_status()

    async def sdk(session: Any, number: int) -> None:
        client = AsyncOpenAI(
            base_url=session.base_url, api_key=session.api_key, http_client=proxy.http_client, max_retries=0
        )
        await client.chat.completions.create(**body(number))

    gc.collect()
    gc.freeze()
    costs: dict[str, list[float]] = {"proxy": [], "sdk": []}
    for turn in range(13):
        for offset, (name, call) in enumerate((("proxy", bare), ("sdk", sdk))):
            sessions = [proxy.open_session() for _ in range(64)]
            first = 16 * turn + 8 * offset
            before = time.process_time()
            await asyncio.gather(*(call(each, first + number // 8) for number, each in enumerate(sessions)))
            costs[name].append(1e6 * (time.process_time() - before) / 64)
            for each in sessions:
                await proxy.end_session(each)
    await proxy.aclose()
    gc.unfreeze()
    return {name: statistics.median(rounds[1:]) for name, rounds in costs.items()}


def end_to_end(name: str, step_seconds: list[float], rewards: list[float]) -> dict[str, Any]:
    """The first step is not counted: it fills caches, or has its episodes already."""
    counted = step_seconds[1:]
    figures = {
        "samples_per_second": PROMPTS * SAMPLES * len(counted) / sum(counted),
        "first_reward": float(np.mean(rewards[:SAME_REWARD_STEPS])),
        "last_reward": float(np.mean(rewards[-SAME_REWARD_STEPS:])),
        "seconds": sum(step_seconds),
    }
    print(f"{name}: {figures}", file=sys.stderr)
    return figures


def run() -> tuple[dict[str, Any], list[Aim]]:
    model = find_model("builtin:tiny-math")
    alone = step_alone(model)
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        rlvr = (
            "areal.workflow.RLVRWorkflow",
            place,
            "reward_fn=areal.reward.exact_match_reward",
            "rollout.num_workers=2",
        )
        direct = areal(*rlvr)
        peer = trl(model, place)
        direct["cpu_seconds_per_step"] = steady_cpu(direct, areal(*rlvr, steps=START_STEPS))
        sdk = ("areal.workflow.openai.math_agent.MathAgent", place)
        agent = areal(*sdk)
        costs = agent["cpu_us_per_sample"] = sample_costs(agent, areal(*sdk, steps=START_STEPS))
    ratio = direct["samples_per_second"] / peer["samples_per_second"]
    aims = [
        Aim.at_least("trained tokens/s over transformers with padded rows, groups", alone["groups"]["ratio"], 1.0),
        Aim.at_least(
            "trained tokens/s over transformers with padded rows, 8-turn conversations",
            alone["conversations"]["ratio"],
            1.0,
        ),
        Aim.at_least("samples/s over TRL, RLVRWorkflow", ratio, 5.0),
        Aim.at_most("TRL's reward minus ours after the same steps", peer["last_reward"] - direct["last_reward"], 0.05),
        Aim.at_most("processor time of the proxy in a sample of an SDK agent, µs", costs["proxy"], 350.0),
        Aim.at_most("the same of the rest of the episode, µs", costs["rest_of_the_episode"], 150.0),
    ]
    return {"step": alone, "rlvr": direct, "trl": peer, "sdk_agent": agent, "over_trl": ratio}, aims


if __name__ == "__main__":
    main(__doc__ or "", run)
