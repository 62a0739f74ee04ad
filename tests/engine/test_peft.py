"""Adapters go to PEFT and come from it: the same files, the same log-probs. Needs PEFT (`make test-lora`)."""

from pathlib import Path
from typing import Any

import pytest
import torch
from test_lora import EXACT, conversation, disturb, learner, write_llama
from tiny_models import write_model
from torch import Tensor
from transformers_models import write_gemma2

from areal.api.errors import ModelError
from areal.config.training import LoraConfig
from areal.engine.models import open_adapted, open_runner
from areal.engine.training.engine import ScoringEngine, TokenBatch

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.slow

MODELS: dict[str, Any] = {
    "qwen3": (write_model, []),
    "llama": (write_llama, ["q_proj", "v_proj", "lm_head"]),
    "gemma2": (write_gemma2, []),
}


@pytest.fixture(params=MODELS, scope="module")
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    write, targets = MODELS[request.param]
    return write(tmp_path_factory.mktemp("models") / "model"), targets


def plain(model: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)


def logprobs(module: Any, asked: TokenBatch) -> Tensor:
    """What PEFT's model finds, sequence by sequence."""
    found = []
    with torch.no_grad():
        for span in asked.spans:
            every = (module.eval()(torch.from_numpy(span.ids)[None]).logits[0] / 0.8).log_softmax(-1)
            found.append(every[span.asked - 1, span.ids[span.asked]])
    return torch.cat(found)


def test_peft_loads_what_is_saved_here(case: tuple[Path, list[str]], tmp_path: Path) -> None:
    model, targets = case
    engine = learner(model, LoraConfig(rank=4, alpha=6.0, targets=targets))
    disturb(engine)
    engine.save(str(tmp_path))
    loaded = peft.PeftModel.from_pretrained(plain(model), tmp_path)
    expected = engine.logprobs(conversation())
    torch.testing.assert_close(logprobs(loaded, conversation()), expected, atol=EXACT, rtol=0)
    by_name = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    torch.testing.assert_close(logprobs(by_name, conversation()), expected, atol=EXACT, rtol=0)


def test_what_peft_has_made_is_trained_and_opened_here(case: tuple[Path, list[str]], tmp_path: Path) -> None:
    model, targets = case
    config = peft.LoraConfig(
        r=3, lora_alpha=9, target_modules=targets or "all-linear", task_type="CAUSAL_LM", init_lora_weights=False
    )
    torch.manual_seed(0)
    made = peft.get_peft_model(plain(model), config)
    made.save_pretrained(tmp_path, save_embedding_layers=False)  # it would save the head itself too
    expected = logprobs(made, conversation())
    lora = LoraConfig(rank=3, alpha=9.0, targets=targets, path=str(tmp_path))
    own = open_adapted(model, lora, name=str(model), seed=1)
    torch.testing.assert_close(ScoringEngine(own).logprobs(conversation()), expected, atol=EXACT, rtol=0)
    merged = open_runner(tmp_path)
    judge = dict(made.merge_and_unload().named_parameters())
    for name, weight in merged.named_weights():
        torch.testing.assert_close(weight, judge[name], atol=1e-5, rtol=0)


def test_what_peft_computes_in_another_way_is_refused(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    config = peft.LoraConfig(r=3, target_modules=["q_proj"], task_type="CAUSAL_LM", use_rslora=True)
    peft.get_peft_model(plain(model), config).save_pretrained(tmp_path / "adapter")
    with pytest.raises(ModelError, match=r"use_rslora=True is not computed here; leave use_rslora at its default"):
        open_adapted(model, LoraConfig(rank=3, path=str(tmp_path / "adapter")), name="m", seed=1)
