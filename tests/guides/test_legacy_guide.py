"""The legacy guide's steps in its own shapes: an agent, environments, a registration, a config, the command."""

import asyncio
import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import realhf
from areal.api.messages import Episode
from areal.config.loader import load_expr_config
from areal.config.rollout import GenerationHyperparameters
from areal.engine.builtin.tokenizer import make_tokenizer
from areal.engine.inference.fake import FakeEngine
from areal.infra.workflow_context import WorkflowContext
from areal.rollout.episodes import run_episode
from areal.rollout.loading import Fillers, WorkflowSpec, load
from areal.rollout.runners.workflow import WorkflowRunner
from realhf.api.core.agent import (
    Agent,
    AgentAbstraction,
    BundledGenerationOutputs,
    EnvironmentService,
    EnvServiceAbstraction,
    SequenceSample,
    register_agent,
    register_environment,
)
from realhf.episode import LegacyWorkflow
from realhf.experiments.async_exp.async_math_ppo import AsyncRLExperimentConfig, PPOMATHConfig
from realhf.training.main_async_ppo import workflow_arguments

TASK = {"messages": [{"role": "user", "content": "Sort 5291"}], "answer": "1259"}
TOKENIZER = make_tokenizer(["Sort 5291 into 1259, your answer is wrong, try again"] * 4, 300, 1024)


# Step 1 and 2: the agent. ---------------------------------------------------------------------------------------------


class GuideAgent(Agent):
    """Unpacks two values from a step, extends its own token list, and returns one packed sample."""

    def __init__(self, gconfig, tokenizer, my_param, num_turns):
        self.gconfig = gconfig
        self.tokenizer = tokenizer
        self.my_param = my_param
        self.num_turns = num_turns

    async def collect_trajectory(
        self,
        prompt: SequenceSample,
        env: EnvironmentService,
        obs_queue: asyncio.Queue,
        act_queue: asyncio.Queue,
    ):
        qid = prompt.ids[0]
        token_ids = prompt.data["packed_prompts"].cpu().numpy().tolist()
        data = {"packed_input_ids": [], "prompt_mask": [], "packed_logprobs": [], "rewards": []}
        lengths = []
        for _turn in range(self.num_turns):
            await obs_queue.put((qid, token_ids, self.gconfig))

            act: BundledGenerationOutputs = await act_queue.get()

            answers = [self.tokenizer.decode(ids, skip_special_tokens=True) for ids in act.output_ids]
            success, rewards = await env.step((qid, answers))

            data["packed_input_ids"].extend(act.seqs[0])
            data["prompt_mask"].extend([1] * act.prompt_len + [0] * (act.seqlens[0] - act.prompt_len))
            data["packed_logprobs"].extend(act.logprobs[0])
            data["rewards"].append(self.my_param * rewards[0])
            lengths.append(act.seqlens[0])

            if success[0]:
                feedback = "Congratulations! You are correct!"
            else:
                feedback = "Unfortunately your answer is wrong. Let's try again."
            feedback = "\n" + self.tokenizer.apply_chat_template(
                [{"content": feedback, "role": "user"}],
                add_generation_prompt=True,
                tokenize=False,
            )
            feedback_tokens = self.tokenizer(feedback)["input_ids"]
            token_ids = list(act.seqs[0])
            token_ids.extend(feedback_tokens)
        seqlens = {key: [lengths] for key in ("packed_input_ids", "prompt_mask")}
        seqlens["packed_logprobs"] = [[length - 1 for length in lengths]]
        seqlens["rewards"] = [[1] * len(lengths)]
        return [SequenceSample(keys=list(data), ids=[qid], seqlens=seqlens, data=data)]


class FiveValueAgent(GuideAgent):
    """Takes what an environment of the usual shape returns, and leaves the rest to the record."""

    async def collect_trajectory(self, prompt, env, obs_queue, act_queue):
        await env.reset(seed=1, options={})
        await obs_queue.put((prompt.ids[0], prompt.data["packed_prompts"].tolist(), self.gconfig))
        act = await act_queue.get()
        obs, rewards, terminated, truncated, info = await env.step((act.qid, ["1259"]))
        assert (obs, rewards, terminated, truncated, info) == (None, [1.0], True, False, {})


# The environment. -----------------------------------------------------------------------------------------------------


def verify(answers, solution):
    return [float(answer == solution) for answer in answers]


class GuideEnv(EnvironmentService):
    def __init__(self, dataset_path):
        self.dataset_path = dataset_path

    async def step(self, action: tuple[str, list[str]]):
        _qid, answers = action
        format_rewards = await asyncio.to_thread(verify, answers, "1259")
        return None, format_rewards, True, False, {}


class TwoValueEnv(GuideEnv):
    async def step(self, action):
        _, format_rewards, *_ = await super().step(action)
        return [reward > 0 for reward in format_rewards], format_rewards


# Step 3: registration and configuration. ------------------------------------------------------------------------------

register_agent("guide-agent", GuideAgent)
register_agent("five-value-agent", FiveValueAgent)
register_environment("guide-env", GuideEnv)
register_environment("two-value-env", TwoValueEnv)


@dataclasses.dataclass
class GuideConfig(AsyncRLExperimentConfig, PPOMATHConfig):
    my_param: float = 1.0

    @property
    def agent(self) -> AgentAbstraction:
        return AgentAbstraction(
            "guide-agent",
            args=dict(  # noqa: C408
                my_param=self.my_param,
                num_turns=2,
            ),
        )

    @property
    def env(self) -> EnvServiceAbstraction:
        return EnvServiceAbstraction("two-value-env", args=dict(dataset_path=self.dataset.path))  # noqa: C408


@dataclasses.dataclass
class FiveValueConfig(GuideConfig):
    @property
    def agent(self) -> AgentAbstraction:
        return AgentAbstraction("five-value-agent", super().agent.args)

    @property
    def env(self) -> EnvServiceAbstraction:
        return EnvServiceAbstraction("guide-env", super().env.args)


async def episode_of(config_class: type, *words: str) -> Episode:
    """One episode as a rollout worker runs it, the engine saying something wrong first."""
    config, _ = load_expr_config(words, config_class)
    answers = iter(["9521", "1259"])

    def script(ids):
        return [*TOKENIZER.encode(next(answers)), TOKENIZER.eos_token_id]

    engine = FakeEngine(vocab_size=len(TOKENIZER), script=script, tokenizer=TOKENIZER)
    spec = WorkflowSpec.unpack(WorkflowSpec(LegacyWorkflow, workflow_arguments(config)).pack())
    workflow = load(spec, Fillers(GenerationHyperparameters(max_new_tokens=32), TOKENIZER))
    runner = WorkflowRunner(workflow, engine, TOKENIZER)
    outcome, _ = await run_episode(runner, dict(TASK), WorkflowContext(), greedy=False, seconds=30)
    assert isinstance(outcome, Episode), outcome
    return outcome


async def test_agent_in_the_guides_shape_with_an_environment_of_two_values() -> None:
    episode = await episode_of(GuideConfig, "my_param=5.0")
    first, second = episode.rows
    assert [row.reward for row in episode.rows] == [0.0, 5.0]
    assert second.input_ids[: len(first.input_ids)].tolist() == first.input_ids.tolist()
    assert [TOKENIZER.decode(row.input_ids[row.loss_mask]) for row in episode.rows] == [
        "9521<|im_end|>",
        "1259<|im_end|>",
    ]
    assert "<|im_end|>\n<|im_start|>user\nUnfortunately your answer" in TOKENIZER.decode(second.input_ids)


async def test_environment_of_five_values_and_an_agent_that_returns_none() -> None:
    episode = await episode_of(FiveValueConfig)
    assert [row.reward for row in episode.rows] == [1.0]


# Step 4: the command. -------------------------------------------------------------------------------------------------


@pytest.mark.timeout(300)
def test_command_of_the_guide_trains(tmp_path: Path, tiny_math: Path) -> None:
    """Run by its path as the guide says, without help from PYTHONPATH."""
    root = Path(realhf.__file__).parents[1]
    words = ["my_param=5.0", "total_train_steps=2", f"output_dir={tmp_path}", "trial_name=guide"]
    small = ["rollout.num_workers=1", "train_dataset.batch_size=4", "valid_dataset.size=8", "evaluator.freq_steps=null"]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "realhf/training/main_async_ppo.py", *words, *small],
        cwd=root,
        env=env,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("realhf is the older interface") == 1
    run = tmp_path / "async-ppo-math/guide"
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "reward" in row]
    assert [row["step"] for row in steps] == [1, 2]
    # A right first try is worth 5, a right second one 0.9 of it: no mean that my_param=1 could give.
    assert max(row["rollout/first_return"] for row in steps) > 1
    assert json.loads((run / "summary.json").read_text())["steps"] == 2
