"""An agent that asks, says whether the answer was right, and asks again."""

import asyncio
from typing import Any

from areal.config.errors import require
from areal.infra import workflow_context
from areal.trajectory.rendering import Renderer
from areal.utils import stats_tracker
from areal.workflow.math_task import TRY_AGAIN
from realhf.api.core.agent_api import (
    Agent,
    BundledGenerationOutputs,
    EnvironmentService,
    GenerationHyperparameters,
    SequenceSample,
    register_agent,
)


class MathMultiTurnAgent(Agent):
    def __init__(
        self,
        gconfig: GenerationHyperparameters,
        tokenizer: Any,
        num_turns: int = 2,
        turn_level_discount: float = 0.9,
        my_param: float = 1.0,
        right_feedback: str = "That is right.",
        wrong_feedback: str = TRY_AGAIN,
        stop_when_right: bool = True,
    ) -> None:
        """`my_param` is what a right answer is worth to the trainer: it multiplies returns, while reported rewards stay
        1 and 0. A turn's return is its own reward plus `turn_level_discount` times that of the next turn.
        """
        require(num_turns >= 1, f"num_turns must be >= 1, got {num_turns}")
        require(getattr(gconfig, "n", 1) == 1, f"gconfig.n must be 1: a turn continues one answer, got {gconfig}")
        self.gconfig = gconfig
        self.tokenizer = tokenizer
        self.num_turns = num_turns
        self.turn_level_discount = turn_level_discount
        self.my_param = my_param
        self.right_feedback = right_feedback
        self.wrong_feedback = wrong_feedback
        self.stop_when_right = stop_when_right
        self._renderer = Renderer(tokenizer)

    async def collect_trajectory(
        self,
        prompt: SequenceSample,
        env: EnvironmentService,
        obs_queue: "asyncio.Queue[Any]",
        act_queue: "asyncio.Queue[BundledGenerationOutputs]",
    ) -> list[SequenceSample]:
        qid, token_ids = prompt.ids[0], prompt.data["packed_prompts"].tolist()
        await env.reset()
        acts: list[BundledGenerationOutputs] = []
        rewards: list[float] = []
        for _ in range(self.num_turns):
            await obs_queue.put((qid, token_ids, self.gconfig))
            act = await act_queue.get()
            answer = self.tokenizer.decode(act.output_ids[0], skip_special_tokens=True)
            _, (reward,), *_ = await env.step((qid, [answer]))
            acts.append(act)
            rewards.append(float(reward))
            if reward > 0 and self.stop_when_right:
                break
            token_ids = act.seqs[0] + self.feedback_ids(act.output_ids[0], reward > 0)
        returns = self._returns(rewards)
        stats = stats_tracker.get(workflow_context.stat_scope())
        stats.scalar(first_try=rewards[0], first_return=returns[0], turns=len(acts))
        return [_trajectory(qid, acts, rewards, returns)]

    def feedback_ids(self, output_ids: list[int], right: bool) -> list[int]:
        """What follows an answer: the end of its turn, if the answer was cut off, and the user's next message."""
        mark = self._renderer.sentinel
        conversation = [
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": mark},
            {"role": "user", "content": self.right_feedback if right else self.wrong_feedback},
        ]
        after = self._renderer.render(conversation, None).rpartition(mark)[2]
        closing = self._renderer.encode(after.lstrip())
        return closing[1:] if closing[:1] == output_ids[-1:] else self._renderer.encode(after)

    def _returns(self, rewards: list[float]) -> list[float]:
        returns = [self.my_param * reward for reward in rewards]
        for turn in reversed(range(len(returns) - 1)):
            returns[turn] += self.turn_level_discount * returns[turn + 1]
        return returns


def _trajectory(
    qid: Any, acts: list[BundledGenerationOutputs], rewards: list[float], returns: list[float]
) -> SequenceSample:
    """A sequence per turn, in which everything before the turn's own answer is prompt."""
    masks = [[1] * act.prompt_len + [0] * len(act.output_ids[0]) for act in acts]
    return SequenceSample(
        ids=[qid],
        seqlens={"packed_input_ids": [[act.seqlens[0] for act in acts]]},
        data={
            "packed_input_ids": [token for act in acts for token in act.seqs[0]],
            "prompt_mask": [place for mask in masks for place in mask],
            "packed_logprobs": [logprob for act in acts for logprob in act.logprobs[0]],
            "seq_no_eos_mask": [act.no_eos[0] for act in acts],
            "version_start": [act.version_start[0] for act in acts],
            "version_end": [act.version_end[0] for act in acts],
            "rewards": rewards,
            "returns": returns,
        },
    )


register_agent("math-multi-turn", MathMultiTurnAgent)
