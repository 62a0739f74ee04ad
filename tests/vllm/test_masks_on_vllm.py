"""A real vLLM server tells what grammars, min_new_tokens, top_p and top_k left to draw from, as the trainer needs it:
under masks of all kinds in the same steps, and of answers whose weights changed while they were drawn."""

import asyncio
from dataclasses import replace

import pytest
import torch
from engine_kinds import answer, ask, soon, until
from test_agreement import recomputed
from test_choices import asked, sampled
from test_vllm_engine import TOLERANCE
from vllm_engines import VllmEngines

from areal.api.engine_api import InferenceEngine
from areal.api.io_struct import ModelRequest

pytestmark = pytest.mark.asyncio(loop_scope="session")


def taken(requests: list[ModelRequest]) -> list[ModelRequest]:
    """But for those that vLLM refuses."""
    return [each for each in requests if each.grammar is None or each.gconfig.min_new_tokens == 0]


async def test_logprobs_are_the_trainers_under_every_mask(engines: VllmEngines, engine: InferenceEngine) -> None:
    await engine.update_weights(engines.publish())
    requests = taken(asked())
    answers = await soon(asyncio.gather(*map(engine.agenerate, requests)))
    differences = (recomputed(engines.trainer, requests, answers) - sampled(answers)).abs()
    print(f"log-probs of vLLM and of the trainer under masks differ by {differences.max():.1e} at most")
    assert differences.max() < TOLERANCE
    whole = [replace(each, choices=None) for each in answers]
    assert (recomputed(engines.trainer, requests, whole) - sampled(answers)).abs().max() > 0.1, "masks matter"
    limited = [each.choices for each in answers if each.choices is not None and each.choices.sizes is not None]
    assert len(limited) >= 6
    assert not any(each.choices.unreported for each in answers if each.choices is not None)


async def test_sets_are_not_larger_than_top_k_and_hold_every_drawn_token(engine: InferenceEngine) -> None:
    limited = await answer(engine, max_new_tokens=30, seed=1, top_k=5)
    assert limited.choices is not None
    sets = limited.choices.sets()
    assert [len(left) for left in sets] == [5] * 30
    assert all(token in left for token, left in zip(limited.output_tokens, sets, strict=True))
    narrower = await answer(engine, max_new_tokens=30, seed=1, top_k=5, top_p=0.5)
    assert narrower.choices is not None
    assert narrower.choices.sizes is not None
    assert max(narrower.choices.sizes) < 5


async def test_sets_are_those_of_the_weights_that_drew_on_vllm(engines: VllmEngines, engine: InferenceEngine) -> None:
    await engine.update_weights(old := engines.publish())
    flats = {old.version: engines.trainer.flat.detach().clone()}
    requests = [ask([5 + i] * (3 + 9 * i), seed=i, max_new_tokens=60, top_k=20, top_p=0.9) for i in range(4)]
    tasks = [asyncio.create_task(engine.agenerate(request)) for request in requests]
    await until(engine, running=4)
    engines.trainer.flat *= 1.5  # so that the likeliest tokens are others
    await engine.update_weights(new := engines.publish())
    flats[new.version] = engines.trainer.flat.detach().clone()
    answers = await soon(asyncio.gather(*tasks))
    engines.trainer.flat /= 1.5
    versions = torch.tensor([version for each in answers for version in each.output_versions])
    assert set(versions.tolist()) == set(flats)
    present = engines.trainer.flat.detach().clone()
    for version, flat in flats.items():
        engines.trainer.flat.copy_(flat)
        found = recomputed(engines.trainer, requests, answers)[versions == version]
        torch.testing.assert_close(found, sampled(answers)[versions == version], atol=TOLERANCE, rtol=0)
    engines.trainer.flat.copy_(present)
