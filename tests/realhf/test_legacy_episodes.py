"""Episodes of older agents: their queues, what they return, and how they fail."""

import asyncio

import numpy as np
import pytest
from legacy_stage import TASK, TOKENIZER, TwoValues, accepted, play, returns_of, saying, trained_texts

from areal.api.engine_api import WeightUpdate
from areal.api.errors import RejectReason
from areal.trajectory.rendering import Renderer
from realhf.api.core.agent_api import Agent, GenerationHyperparameters, SequenceSample
from realhf.impl.agent.math_multi_turn_agent import MathMultiTurnAgent

QUESTION = Renderer(TOKENIZER).encode(Renderer(TOKENIZER).render(TASK["messages"], None))


class Asking(Agent):
    """Asks once, has the answers judged and returns what `make` makes of them: None, if it is not overridden."""

    def __init__(self, gconfig, tokenizer):
        self.gconfig = gconfig
        self.tokenizer = tokenizer

    async def collect_trajectory(self, prompt, env, obs_queue, act_queue):
        await obs_queue.put((prompt.ids[0], prompt.data["packed_prompts"], self.gconfig))
        act = await act_queue.get()
        await env.step((act.qid, [self.tokenizer.decode(ids, skip_special_tokens=True) for ids in act.output_ids]))
        return self.make(act)

    def make(self, act):
        return None


def sample_of(act, **changes):
    data = {
        "packed_input_ids": act.seqs[0],
        "prompt_mask": [1] * act.prompt_len + [0] * len(act.output_ids[0]),
        "rewards": [0.5],
        **changes,
    }
    return [SequenceSample(ids=[act.qid], data={key: value for key, value in data.items() if value is not None})]


async def test_wrong_answer_is_followed_by_feedback_and_another_try() -> None:
    episode = accepted(await play(MathMultiTurnAgent, saying("9521", "1259"), my_param=5.0))
    first, second = episode.rows
    assert (episode.reward, episode.calls) == (1.0, 2)
    assert list(trained_texts(episode.rows)) == ["9521<|im_end|>", "1259<|im_end|>"]
    assert first.input_ids[: len(QUESTION)].tolist() == QUESTION
    assert second.input_ids[: len(first.input_ids)].tolist() == first.input_ids.tolist()
    feedback = second.input_ids[len(first.input_ids) : -int(second.loss_mask.sum())]
    assert (
        TOKENIZER.decode(feedback) == "\n<|im_start|>user\nThat is wrong. Try again.<|im_end|>\n<|im_start|>assistant\n"
    )
    assert returns_of(episode.rows) == [4.5, 5.0]
    assert episode.stats == {"rollout/first_try": 0.0, "rollout/first_return": 4.5, "rollout/turns": 2.0}
    assert [message["role"] for message in episode.messages] == ["prompt", "assistant"] * 2


async def test_right_answer_ends_the_episode_unless_set_otherwise() -> None:
    assert len(accepted(await play(MathMultiTurnAgent, saying("1259"), num_turns=3)).rows) == 1
    episode = accepted(await play(MathMultiTurnAgent, saying("1259"), num_turns=3, stop_when_right=False))
    assert returns_of(episode.rows) == [2.71, 1.9, 1.0]
    assert "That is right." in TOKENIZER.decode(episode.rows[1].input_ids)


async def test_turn_that_was_cut_off_is_closed_before_feedback() -> None:
    engine = saying("9521 9521", cut_off=True)
    episode = accepted(await play(MathMultiTurnAgent, engine, max_new_tokens=3))
    assert [row.truncated for row in episode.rows] == [True, True]
    assert "assistant\n952<|im_end|>\n<|im_start|>user" in TOKENIZER.decode(episode.rows[1].input_ids)


async def test_rows_hold_what_the_engine_recorded() -> None:
    class Remade(Asking):
        def make(self, act):
            return sample_of(act)

    engine = saying("1259")
    await engine.update_weights(WeightUpdate(3, "third", ""))
    (row,) = accepted(await play(Remade, engine)).rows
    sampled = int(row.loss_mask.sum())
    assert row.versions.tolist() == [-1] * len(QUESTION) + [3] * sampled
    assert (row.logprobs[row.loss_mask] < 0).all()
    assert not row.logprobs[~row.loss_mask].any()
    assert row.completion_index[row.loss_mask].tolist() == [0] * sampled
    assert row.reward == 0.5


async def test_observations_are_answered_side_by_side_and_told_apart_by_qid() -> None:
    class Branching(Asking):
        async def collect_trajectory(self, prompt, env, obs_queue, act_queue):
            prompts = {qid: self.tokenizer.encode(f"Sort {qid}") for qid in ("1", "22", "333")}
            for qid, ids in prompts.items():
                await obs_queue.put((qid, ids, self.gconfig))
            acts = [await act_queue.get() for _ in prompts]
            assert {act.qid: act.prompt_ids for act in acts} == prompts
            return [sample for act in acts for sample in sample_of(act, rewards=[float(act.qid)])]

    episode = accepted(await play(Branching, saying("1259")))
    assert sorted(row.reward for row in episode.rows) == [1.0, 22.0, 333.0]


async def test_n_answers_to_one_observation_come_as_one_bundle() -> None:
    class Three(Asking):
        def __init__(self, gconfig, tokenizer):
            super().__init__(gconfig.new(n=3), tokenizer)

        def make(self, act):
            assert len(act.output_ids) == len(act.seqs) == len(act.no_eos) == len(act.version_start) == 3
            assert [len(logprobs) for logprobs in act.logprobs] == [length - 1 for length in act.seqlens]

    episode = accepted(await play(Three, saying("9521", "1259", "5291")))
    assert sorted(zip(returns_of(episode.rows), trained_texts(episode.rows), strict=True)) == [
        (0.0, "5291<|im_end|>"),
        (0.0, "9521<|im_end|>"),
        (1.0, "1259<|im_end|>"),
    ]


@pytest.mark.parametrize("env", [TwoValues, None])
async def test_none_keeps_every_generation_with_the_last_reward(env) -> None:
    class Twice(Asking):
        async def collect_trajectory(self, prompt, env, obs_queue, act_queue):
            ids = prompt.data["packed_prompts"].tolist()
            for _ in range(2):
                await obs_queue.put((prompt.ids[0], ids, self.gconfig))
                act = await act_queue.get()
                await env.step((act.qid, [self.tokenizer.decode(act.output_ids[0][:-1])]))
                ids = act.seqs[0] + self.tokenizer.encode("?")

    options = {"env": env} if env else {}
    episode = accepted(await play(Twice, saying("9521", "1259"), turn_discount=0.5, **options))
    assert returns_of(episode.rows) == [0.5, 1.0]
    assert [row.reward for row in episode.rows] == [0.0, 1.0]


async def test_whole_conversation_as_one_sequence_is_trained_on_every_answer_in_it() -> None:
    class Whole(Asking):
        async def collect_trajectory(self, prompt, env, obs_queue, act_queue):
            ids, mask = prompt.data["packed_prompts"].tolist(), []
            for _ in range(2):
                mask += [0] * (len(ids) - len(mask))
                await obs_queue.put((prompt.ids[0], ids, self.gconfig))
                act = await act_queue.get()
                mask += [1] * len(act.output_ids[0])
                ids = act.seqs[0] + self.tokenizer.encode("?")
            data = {"packed_input_ids": np.array(act.seqs[0]), "loss_mask": np.array(mask), "rewards": np.array([1.0])}
            return [SequenceSample(ids=prompt.ids, data=data)]

    (row,) = accepted(await play(Whole, saying("9521", "1259"))).rows
    assert list(trained_texts([row])) == ["9521<|im_end|>1259<|im_end|>"]
    assert sorted(set(row.completion_index.tolist())) == [-1, 0, 1]


async def test_empty_list_rejects_the_episode() -> None:
    class Picky(Asking):
        def make(self, act):
            return []

    rejection = await play(Picky, saying("1259"))
    assert rejection.reason is RejectReason.FILTERED
    assert "Picky returned an empty list" in rejection.detail


def other_tokens(act):
    return [*act.seqs[0][:-2], act.seqs[0][-2] + 1, act.seqs[0][-1]]


WRONG_SAMPLES = {
    "the engine did not sample it": lambda act: sample_of(act, packed_input_ids=other_tokens(act)),
    "to be trained, but the engine did not sample": lambda act: sample_of(act, prompt_mask=[0] * act.seqlens[0]),
    "a second time": lambda act: sample_of(act) * 2,
    "without a token to train on": lambda act: sample_of(act, prompt_mask=[1] * act.seqlens[0]),
    "packed_logprobs[": lambda act: sample_of(act, packed_logprobs=[-9.0] * (act.seqlens[0] - 1)),
    "version_end[0] = 7 where the engine said 0": lambda act: sample_of(act, version_end=[7]),
    "seq_no_eos_mask[0] = True": lambda act: sample_of(act, seq_no_eos_mask=[True]),
    "scores is unknown": lambda act: sample_of(act, scores=[1.0]),
    "rewards is missing; prompt_mask (1 on": lambda act: sample_of(act, rewards=None, prompt_mask=None),
    "say the same twice": lambda act: sample_of(act, loss_mask=[1] * act.seqlens[0]),
    "packed_logprobs must have": lambda act: sample_of(act, packed_logprobs=[0.0]),
    "must be 1-D and of numbers": lambda act: sample_of(act, packed_input_ids=[float(i) for i in act.seqs[0]]),
    "got SequenceSample": lambda act: sample_of(act)[0],
    "got dict in it": lambda act: [{}],
}


@pytest.mark.parametrize("complaint", WRONG_SAMPLES)
async def test_sample_that_the_record_does_not_bear_out_is_refused_by_name(complaint: str) -> None:
    class Wrong(Asking):
        def make(self, act):
            return WRONG_SAMPLES[complaint](act)

    rejection = await play(Wrong, saying("1259"))
    assert rejection.reason is RejectReason.AGENT_ERROR
    assert complaint in rejection.detail
    assert "Wrong" in rejection.detail


async def test_reward_that_is_no_number_rejects_as_reward_error() -> None:
    class Infinite(Asking):
        def make(self, act):
            return sample_of(act, rewards=[float("inf")])

    class Huge(Asking):
        def make(self, act):
            return sample_of(act, rewards=[-1e308])

    class Unjudged(Asking):
        async def collect_trajectory(self, prompt, env, obs_queue, act_queue):
            await obs_queue.put((0, [5], self.gconfig))
            await act_queue.get()

    class Wordy(TwoValues):
        async def step(self, action):
            return None, "good"

    outcomes = [
        await play(Infinite, saying("1259")),
        await play(Huge, saying("1259")),
        await play(Unjudged, saying("1259")),
        await play(Asking, saying("1259"), Wordy),
    ]
    assert [outcome.reason for outcome in outcomes] == [RejectReason.REWARD_ERROR] * 4
    assert "at most 3.4e+38 in size" in outcomes[1].detail
    assert "without a call of env.step" in outcomes[2].detail


async def test_agent_that_asks_nothing_is_rejected_as_such() -> None:
    class Silent(Asking):
        async def collect_trajectory(self, prompt, env, obs_queue, act_queue):
            return None

    assert (await play(Silent, saying("1259"))).reason is RejectReason.NO_INTERACTIONS


async def test_failing_agent_loses_its_own_trajectory_only() -> None:
    class Failing(Asking):
        async def collect_trajectory(self, prompt, env, obs_queue, act_queue):
            await obs_queue.put((prompt.ids[0], [5, 6], self.gconfig))
            raise ZeroDivisionError("its own fault")

    engine = saying("1259")
    lost, kept = await asyncio.gather(play(Failing, engine), play(MathMultiTurnAgent, engine))
    assert lost.reason is RejectReason.AGENT_ERROR
    assert "Failing raised ZeroDivisionError: its own fault" in lost.detail
    assert "in collect_trajectory" in lost.trace
    assert accepted(kept).reward == 1.0


async def test_time_out_cancels_agent_and_generation() -> None:
    engine = saying("1259")
    await engine.pause()
    rejection = await play(Asking, engine, seconds=0.05)
    health = await engine.health()
    assert rejection.reason is RejectReason.TIMEOUT
    assert (health.running, health.waiting) == (0, 0)


G = GenerationHyperparameters(max_new_tokens=8)


@pytest.mark.parametrize(
    ("observation", "complaint"),
    [
        (("q", [5]), "an observation must be (qid, token_ids, gconfig)"),
        (("q", [5], {"n": 1}), "gconfig of an observation must be GenerationHyperparameters, got dict"),
        (("q", ["text"], G), "input_ids must be integers"),
        (("q", [5] * 600, G), "ContextLengthError"),
    ],
)
async def test_observation_that_cannot_be_answered_ends_the_episode_at_once(observation, complaint) -> None:
    class Careless(Asking):
        async def collect_trajectory(self, prompt, env, obs_queue, act_queue):
            await obs_queue.put(observation)
            await act_queue.get()

    rejection = await play(Careless, saying("1259"))
    assert rejection.reason is RejectReason.AGENT_ERROR
    assert complaint in rejection.detail
