"""RolloutWorkflows: the engine they are given, and what they may return."""

import asyncio
import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch

from areal.api.engine_api import InferenceEngine, WeightUpdate
from areal.api.errors import RejectReason
from areal.api.io_struct import Grammar, ModelRequest
from areal.api.messages import Episode, GroupTask
from areal.api.workflow_api import RolloutWorkflow
from areal.config.rollout import GenerationHyperparameters
from areal.engine.inference.fake import FakeEngine
from areal.infra import workflow_context
from areal.infra.workflow_context import WorkflowContext
from areal.proxy import ArealOpenAI
from areal.rollout.episodes import run_episode
from areal.rollout.runners.workflow import WorkflowRunner
from areal.trajectory.tensors import RowLimits
from areal.utils import stats_tracker

PROMPT = [5, 6, 7]


class Asking(RolloutWorkflow):
    """Asks the engine once and returns what `build` makes of its answer."""

    def __init__(self, build, **gconfig):
        self.build = build
        self.gconfig = GenerationHyperparameters(max_new_tokens=64, **gconfig)

    async def arun_episode(self, engine, data):
        return self.build(await engine.agenerate(ModelRequest("r", PROMPT, self.gconfig)))


def tensor_dict(response, **changes):
    asked, sampled = response.input_len, response.output_len
    fields = {
        "input_ids": torch.tensor([response.input_tokens + response.output_tokens]),
        "attention_mask": torch.ones(1, asked + sampled, dtype=torch.bool),
        "loss_mask": torch.tensor([[0] * asked + [1] * sampled]),
        "logprobs": torch.tensor([[0.0] * asked + response.output_logprobs]),
        "versions": torch.tensor([[-1] * asked + response.output_versions]),
        "rewards": torch.tensor([0.5]),
        **changes,
    }
    return {name: value for name, value in fields.items() if value is not None}


def short_form(response, **changes):
    return {
        "input_ids": torch.tensor(response.input_tokens),
        "output_ids": torch.tensor(response.output_tokens),
        "reward": torch.tensor(0.5),
        **changes,
    }


async def test_tensor_dict_becomes_rows(play_workflow, engine):
    await engine.update_weights(WeightUpdate(3, "third", ""))
    episode = await play_workflow(Asking(tensor_dict, temperature=0.5))
    (row,) = episode.rows
    sampled = row.input_ids[row.loss_mask]
    assert row.input_ids[:3].tolist() == PROMPT
    assert row.loss_mask.tolist() == [False] * 3 + [True] * len(sampled)
    assert row.versions.tolist() == [-1] * 3 + [3] * len(sampled)
    assert row.temperatures.tolist() == [1.0] * 3 + [0.5] * len(sampled)
    assert row.returns[row.loss_mask].tolist() == [0.5] * len(sampled)
    assert (episode.reward, episode.calls, row.recompute_logprobs) == (0.5, 1, False)
    assert [message["role"] for message in episode.messages] == ["prompt", "assistant"]
    assert "1259" in episode.messages[1]["content"]


async def test_short_form_is_normalised_and_aged_by_what_the_engine_said(play_workflow, engine):
    await engine.update_weights(WeightUpdate(4, "fourth", ""))
    episode = await play_workflow(Asking(short_form))
    (row,) = episode.rows
    assert row.input_ids[:3].tolist() == PROMPT
    assert row.recompute_logprobs
    assert set(row.versions[row.loss_mask].tolist()) == {4}
    assert episode.reward == 0.5


async def test_none_rejects_the_episode(play_workflow):
    rejection = await play_workflow(Asking(lambda response: None))
    assert rejection.reason is RejectReason.FILTERED


async def test_every_wrong_field_is_named_at_once(play_workflow):
    def build(response):
        return tensor_dict(response, loss_mask=None, logprobs=torch.full((1, 8), float("nan")), score=torch.ones(1))

    rejection = await play_workflow(Asking(build))
    assert rejection.reason is RejectReason.AGENT_ERROR
    for text in ("Asking returned a wrong trajectory", "loss_mask is missing", "logprobs must be finite", "score is"):
        assert text in rejection.detail


async def test_versions_that_the_engine_did_not_report_are_refused(play_workflow):
    rejection = await play_workflow(Asking(lambda response: tensor_dict(response, versions=torch.full((1, 8), 9))))
    assert "versions of trained tokens must be the engine's output_versions, [0]" in rejection.detail


async def test_calls_at_several_temperatures_must_say_which_token_was_sampled_at_which(play_workflow):
    class Two(Asking):
        async def arun_episode(self, engine, data):
            await engine.agenerate(ModelRequest("r", PROMPT, self.gconfig.new(temperature=0.5)))
            return await super().arun_episode(engine, data)

    rejection = await play_workflow(Two(tensor_dict))
    assert "temperatures is missing" in rejection.detail
    stated = Two(lambda response: tensor_dict(response, temperatures=torch.full((1, 8), 0.25)))
    (row,) = (await play_workflow(stated)).rows
    assert set(row.temperatures.tolist()) == {0.25}


async def test_trajectory_without_a_call_of_the_engine_is_rejected(play_workflow):
    class Inventing(RolloutWorkflow):
        async def arun_episode(self, engine, data):
            return {"input_ids": np.array([1]), "output_ids": np.array([2]), "reward": 1.0}

    assert (await play_workflow(Inventing())).reason is RejectReason.NO_INTERACTIONS


async def test_error_of_the_workflow_is_kept_with_its_traceback(play_workflow):
    def build(response):
        raise KeyError("answer")

    rejection = await play_workflow(Asking(build))
    assert rejection.reason is RejectReason.AGENT_ERROR
    assert 'raise KeyError("answer")' in rejection.trace


async def test_timeout_aborts_the_generation(play_workflow, engine):
    await engine.pause()
    rejection = await play_workflow(Asking(tensor_dict), seconds=0.2)
    assert rejection.reason is RejectReason.TIMEOUT
    assert (len(engine.requests), engine.in_flight) == (1, 0)


async def test_greedy_episode_asks_for_the_likeliest_tokens(play_workflow, engine):
    (row,) = (await play_workflow(Asking(tensor_dict, temperature=0.5), greedy=True)).rows
    assert engine.requests[0].gconfig.greedy
    assert set(row.temperatures.tolist()) == {1.0}


async def test_engine_of_a_workflow_is_an_inference_engine_in_its_context(play_workflow):
    seen = {}

    async def episode(engine, data):
        seen["engine"] = isinstance(engine, InferenceEngine)
        seen["task"] = (workflow_context.get().task_id, workflow_context.stat_scope())
        stats_tracker.get(workflow_context.stat_scope()).scalar(reward=0.5)
        response = await engine.agenerate(ModelRequest("r", PROMPT, GenerationHyperparameters(max_new_tokens=64)))
        return short_form(response)

    outcome = await play_workflow(episode, is_eval=True)
    assert isinstance(outcome, Episode)
    assert seen == {"engine": True, "task": (7, "eval-rollout")}
    assert outcome.stats == {"eval-rollout/reward": 0.5}


async def test_fault_outside_the_workflow_rejects_its_episode_only(engine):
    class Undecodable:
        def decode(self, ids):
            raise OverflowError("no such token")

    runner = WorkflowRunner(Asking(tensor_dict), engine, Undecodable())
    rejection, _ = await run_episode(runner, {}, WorkflowContext(), greedy=False, seconds=60)
    assert rejection.reason is RejectReason.AGENT_ERROR
    assert "OverflowError: no such token" in rejection.detail
    assert "decode" in rejection.trace


async def test_trajectory_that_the_model_cannot_compute_is_rejected_at_the_door(engine, tokenizer):
    def foreign(response):
        return short_form(response, input_ids=torch.tensor([5, len(tokenizer)]))

    for limits, rule in [
        (RowLimits(vocab_size=len(tokenizer)), f"the model's vocabulary, 0 to {len(tokenizer) - 1}"),
        (RowLimits(max_positions=3), "a row must have at most 3 tokens"),
    ]:
        runner = WorkflowRunner(Asking(foreign), engine, tokenizer, limits)
        rejection, _ = await run_episode(runner, {}, WorkflowContext(), greedy=False, seconds=60)
        assert rejection.reason is RejectReason.AGENT_ERROR
        assert rule in rejection.detail


class WithABadRequest(RolloutWorkflow):
    """A good request and one with `token` in its prompt at the same time; returns what came of the good one."""

    def __init__(self, token):
        self.token = token

    async def arun_episode(self, engine, data):
        settings = GenerationHyperparameters(max_new_tokens=8)
        requests = [ModelRequest("good", PROMPT, settings), ModelRequest("bad", [5, self.token], settings)]
        good, bad = await asyncio.gather(*map(engine.agenerate, requests), return_exceptions=True)
        assert isinstance(bad, Exception)
        return short_form(good)


@pytest.mark.parametrize("token", [300, -1, 2**63, 10**30])
async def test_prompt_outside_the_vocabulary_fails_its_own_request_only(start_worker, tokenizer, token):
    """In a worker with a connection to its engine, as in a run."""
    assert len(tokenizer) <= 300
    worker = await start_worker(WithABadRequest(token), seed=1)
    result = await asyncio.wait_for(worker.run_group(GroupTask(7, pickle.dumps({}), 2)), 60)
    assert (len(result.episodes), result.rejections) == (2, [])


class Conversing:
    """Talks through the direct client and returns the interactions it exports."""

    def __init__(self, tokenizer, style="individual", stream=False):
        self.tokenizer = tokenizer
        self.style = style
        self.stream = stream

    async def arun_episode(self, engine, data):
        async with ArealOpenAI(engine, self.tokenizer) as client:
            messages = list(data["messages"])
            for reward in (0.0, 1.0):
                answer = await client.chat.completions.create(model="any", messages=messages, stream=self.stream)
                said = "".join([c.choices[0].delta.content or "" async for c in answer]) if self.stream else None
                said = said or answer.choices[0].message.content
                messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "hello"}]
                client.set_last_reward(reward)
            client.apply_reward_discount(turn_discount=0.5)
            return client.export_interactions(style=self.style)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("style", "rows"), [("individual", 2), ("concat", 1)])
async def test_interactions_of_the_direct_client_become_rows(play_workflow, tokenizer, engine, style, rows, stream):
    await engine.update_weights(WeightUpdate(3, "third", ""))
    episode = await play_workflow(Conversing(tokenizer, style, stream))
    assert isinstance(episode, Episode), episode
    assert (len(episode.rows), episode.calls, episode.reward) == (rows, 2, 1.0)
    returns = {float(value) for row in episode.rows for value in row.returns[row.loss_mask]}
    assert returns == {0.5, 1.0}
    assert {int(value) for row in episode.rows for value in row.versions[row.loss_mask]} == {3}
    assert (len(episode.messages), episode.messages[-1]["reward"]) == (4, 1.0)
    assert [(node.parent, node.reward) for node in episode.nodes] == [(None, 0.0), (0, 1.0)]
    assert all(0 <= node.asked <= node.answered <= episode.seconds for node in episode.nodes)


async def test_interactions_of_several_clients_have_no_tree_in_common(play_workflow, tokenizer):
    class Two:
        async def arun_episode(self, engine, data):
            one, other = Conversing(tokenizer), Conversing(tokenizer)
            return await one.arun_episode(engine, data) | await other.arun_episode(engine, data)

    episode = await play_workflow(Two())
    assert (len(episode.rows), episode.nodes) == (4, [])


@pytest.mark.slow
async def test_greedy_episode_keeps_what_its_answers_are_held_to(play_workflow, tokenizer, engine):
    digits = Grammar("lark", "start: /[0-9]+/")

    class Held:
        async def arun_episode(self, engine, data):
            await engine.agenerate(ModelRequest("r", PROMPT, GenerationHyperparameters(), tokenizer, digits))

    await play_workflow(Held(), greedy=True)
    (request,) = engine.requests
    assert (request.grammar, request.gconfig.greedy) == (digits, True)


@pytest.mark.parametrize("build", [tensor_dict, short_form])
async def test_rows_say_what_their_tokens_were_drawn_from(play_workflow, build):
    episode = await play_workflow(Asking(build, top_p=0.9))
    (row,) = episode.rows
    (choices,) = row.choices
    assert (choices.begin, choices.end) == (3, len(row.input_ids))
    for token, left in zip(row.input_ids[3:].tolist(), choices.sets(), strict=True):
        assert token in left
    plain = await play_workflow(Asking(build))
    assert plain.rows[0].choices == []


async def test_the_beginning_of_an_answer_was_drawn_from_the_beginning_of_its_sets(play_workflow):
    def shortened(response):
        kept = response.output_tokens[:2]
        return short_form(response, output_ids=torch.tensor(kept))

    (row,) = (await play_workflow(Asking(shortened, top_k=3))).rows
    (choices,) = row.choices
    assert (choices.begin, choices.end, len(choices.sets())) == (3, 5, 2)


async def test_tokens_that_no_call_has_drawn_are_refused_where_calls_have_limits(play_workflow):
    def other_prompt(response):
        return short_form(response, input_ids=torch.tensor([1, 2]))

    rejection = await play_workflow(Asking(other_prompt, top_p=0.9))
    assert rejection.reason == RejectReason.AGENT_ERROR
    assert "must follow the prompt that they were drawn after" in rejection.detail
    assert isinstance(await play_workflow(Asking(other_prompt)), Episode)


async def test_answers_of_an_engine_that_does_not_report_its_sets_are_not_trained(engine, tokenizer):
    async def unreported(request):
        answer = await FakeEngine.agenerate(engine, request)
        return replace(answer, choices=replace(answer.choices, sizes=None, ids=None, unreported="vLLM"))

    engine.agenerate = unreported
    runner = WorkflowRunner(Asking(tensor_dict, top_p=0.9), engine, tokenizer)
    outcomes = [
        (await run_episode(runner, {}, WorkflowContext(is_eval=is_eval), greedy=False, seconds=20))[0]
        for is_eval in (False, True)
    ]
    assert "asked for top_p or top_k: vLLM does not report what these leave" in outcomes[0].detail
    assert isinstance(outcomes[1], Episode)
