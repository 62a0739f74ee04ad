"""A class in the shape that the add-workflow guide prints trains, and what the guide's steps say holds here."""

import re
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from guide_stage import guide_stage

import areal
from areal import PPOTrainer
from areal.api.cli_args import GenerationHyperparameters, GRPOConfig
from areal.api.engine_api import InferenceEngine
from areal.api.io_struct import ModelRequest, ModelResponse
from areal.api.messages import Episode
from areal.api.reward_api import AsyncRewardWrapper
from areal.api.workflow_api import RolloutWorkflow
from areal.config.rollout import RolloutConfig
from areal.utils import logging
from areal.utils.data import concat_padded_tensors

ROOT = Path(areal.__file__).parents[1]
SKILL = ROOT / ".claude/skills/add-workflow/SKILL.md"

logger = logging.getLogger("GuideWorkflow")


def reward(prompt: str, completion: str, prompt_ids: list[int], completion_ids: list[int], **data: Any) -> float:
    return float(completion.startswith(data["answer"]))


class GuideWorkflow(RolloutWorkflow):
    """Returns the short form: the prompt's ids, the answer's ids and one number, each without a batch."""

    def __init__(self, gconfig: GenerationHyperparameters, tokenizer: Any, reward_fn: Callable[..., float]) -> None:
        self.gconfig = gconfig.new_with_stop_and_pad_token_ids(tokenizer)
        self.tokenizer = tokenizer
        self.async_reward_fn = AsyncRewardWrapper(reward_fn)

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> dict[str, torch.Tensor]:
        input_ids = self.tokenizer.apply_chat_template(data["messages"], tokenize=True, add_generation_prompt=True)
        req = ModelRequest(
            rid=uuid.uuid4().hex,
            input_ids=list(input_ids),
            gconfig=self.gconfig.new(n_samples=1),
            tokenizer=self.tokenizer,
        )
        resp: ModelResponse = await engine.agenerate(req)
        prompt_str = self.tokenizer.decode(input_ids)
        completion_str = self.tokenizer.decode(resp.output_tokens)
        scored = await self.async_reward_fn(prompt_str, completion_str, resp.input_tokens, resp.output_tokens, **data)
        return {
            "input_ids": torch.tensor(resp.input_tokens),
            "output_ids": torch.tensor(resp.output_tokens),
            "reward": torch.tensor(scored),
        }


@pytest.mark.parametrize(("said", "worth"), [("12", 1.0), ("13", 0.0)])
async def test_short_form_becomes_a_row_of_exactly_the_sampled_tokens(said: str, worth: float) -> None:
    async with guide_stage(lambda prompt: said, f"{__name__}.reward") as stage:
        episode = await stage.play(GuideWorkflow)
    assert isinstance(episode, Episode), episode
    (row,) = episode.rows
    sampled = [*stage.tokenizer.encode(said), stage.tokenizer.eos_token_id]
    assert row.input_ids[row.loss_mask].tolist() == sampled
    assert (row.reward, row.recompute_logprobs) == (worth, True)
    assert np.unique(row.versions[row.loss_mask]).tolist() == [0]


@pytest.mark.timeout(300)
def test_guides_class_trains(tmp_path: Path, tiny_math: Path) -> None:
    config = GRPOConfig(
        output_dir=str(tmp_path),
        trial_name="one",
        total_train_steps=2,
        gconfig=GenerationHyperparameters(n_samples=4, max_new_tokens=8),
        rollout=RolloutConfig(in_process=True),
    )
    config.train_dataset.batch_size = 2
    tasks = [
        {"messages": [{"role": "user", "content": f"Sort {number}"}], "answer": "".join(sorted(str(number)))}
        for number in range(231, 251)
    ]
    with PPOTrainer(config, train_dataset=tasks) as trainer:
        result = trainer.train(workflow=GuideWorkflow, workflow_kwargs={"reward_fn": reward})
    assert result.summary["steps"] == 2
    assert result.summary["rejections"] == {}


def test_outputs_of_several_samples_are_joined_batch_first() -> None:
    def tensors(length: int) -> dict[str, torch.Tensor]:
        return {
            "input_ids": torch.ones(1, length, dtype=torch.long),
            "attention_mask": torch.ones(1, length, dtype=torch.bool),
            "rewards": torch.ones(1),
        }

    joined = concat_padded_tensors([tensors(3), tensors(5)])
    assert joined["input_ids"].shape == (2, 5)
    assert joined["rewards"].shape == (2,)
    assert joined["attention_mask"].sum(dim=1).tolist() == [3, 5]


def test_skill_ships_with_its_steps_and_names_what_exists() -> None:
    text = SKILL.read_text()
    assert text.startswith("---\nname: add-workflow\ndescription: ")
    for promised in ("areal new workflow", "areal check", "__all__", "trainer.train(", "tests/test_NAME_workflow.py"):
        assert promised in text
    for mistake in ("aiofiles", "await", "AsyncRewardWrapper"):
        assert mistake in text.split("## Common mistakes")[1]
    files = re.findall(r"`(areal/workflow/\w+\.py)`", text)
    assert len(files) >= 3
    assert [file for file in files if not (ROOT / file).is_file()] == []
