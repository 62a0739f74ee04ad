"""Training models that transformers computes: log-probs, gradients, checkpoints."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers_models import WRITERS, blank_image, drawn_images, image_ids, trainer, write_gpt2, write_llava

from areal.api.errors import ModelError, RequestError
from areal.config.errors import ConfigError
from areal.engine.models import max_positions, open_runner, open_trainable, vocab_size
from areal.engine.training.engine import ScoringEngine, TokenBatch
from areal.engine.training.packing import Span
from areal.engine.training.supervised import mean_nll
from areal.utils.images import decode_image

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llava(tmp_path_factory.mktemp("llava"))


def batch(model: Path, count: int = 6, images: list[bytes] | None = None) -> TokenBatch:
    """Sequences of many lengths with an image each, the last without; tokens before and after the image count."""
    draw, spans = np.random.default_rng(3), []
    for number in range(count):
        text = draw.integers(10, 250, 5 + 3 * number).tolist()
        has_image = number < count - 1
        ids = np.array([*text[:3], *(image_ids(model) if has_image else []), *text[3:]])
        asked = np.array([2, len(ids) - 2, len(ids) - 1])
        spans.append(Span(ids, asked, number, ((images or drawn_images(8))[number],) if has_image else ()))
    total = sum(len(span.asked) for span in spans)
    return TokenBatch(spans, torch.ones(total), {"weights": torch.full((total,), 1 / total)})


def gradient(model: Path, **options: Any) -> torch.Tensor:
    engine = trainer(model, **options)
    engine.train_batch(batch(model), mean_nll)
    return engine.flat_grad


def test_logprobs_are_those_of_plain_transformers(llava: Path) -> None:
    from transformers import AutoModelForImageTextToText, AutoProcessor

    module = AutoModelForImageTextToText.from_pretrained(llava).eval()
    image_processor = AutoProcessor.from_pretrained(llava).image_processor
    expected = []
    for span in batch(llava).spans:
        pixels = [image_processor(decode_image(image), return_tensors="pt")["pixel_values"] for image in span.images]
        ids = torch.from_numpy(span.ids)[None]
        with torch.no_grad():
            logits = module(input_ids=ids, pixel_values=torch.cat(pixels) if pixels else None).logits[0]
        logits[:, image_ids(llava)[0]] = -torch.inf
        expected += [float(logits[place - 1].log_softmax(-1)[span.ids[place]]) for place in span.asked]
    torch.testing.assert_close(trainer(llava).logprobs(batch(llava)), torch.tensor(expected), atol=1e-4, rtol=0)


@pytest.mark.parametrize("max_tokens", [1, 64])
def test_how_a_batch_is_cut_does_not_change_the_gradient(llava: Path, max_tokens: int) -> None:
    whole, cut = gradient(llava), gradient(llava, max_tokens_per_mb=max_tokens)
    torch.testing.assert_close(cut, whole, atol=1e-5, rtol=1e-3)


def test_the_loss_reaches_the_vision_tower(llava: Path) -> None:
    model = open_trainable(llava)
    engine = trainer(llava)
    engine.train_batch(batch(llava), mean_nll)
    assert model.flat.shape == engine.flat_grad.shape
    tower = engine.model.model.module.model.vision_tower  # type: ignore[attr-defined]
    assert all(float(p.grad.abs().sum()) > 0 for n, p in tower.named_parameters() if "post_layernorm" not in n)


def test_an_image_changes_what_follows_and_nothing_before(llava: Path) -> None:
    engine = trainer(llava)
    real, blank = engine.logprobs(batch(llava)), engine.logprobs(batch(llava, images=[blank_image()] * 8))
    changed = (real - blank).abs().view(6, 3) > 1e-6
    assert changed[:5, 1:].all()
    assert not changed[:, 0].any()
    assert not changed[5].any()


@pytest.mark.parametrize("name", WRITERS)
def test_a_checkpoint_is_a_directory_that_transformers_loads(tmp_path: Path, name: str) -> None:
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    model = WRITERS[name](tmp_path / name)
    engine = trainer(model)
    ids = np.arange(20, 40)
    text = TokenBatch([Span(ids, np.arange(5, 20), 0)], torch.ones(15), {"weights": torch.ones(15)})
    engine.train_batch(text, mean_nll)
    engine.save(str(tmp_path / "saved"))
    loader = AutoModelForImageTextToText if name == "llava" else AutoModelForCausalLM
    module, info = loader.from_pretrained(tmp_path / "saved", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert not {"lm_head.weight"} & set(load_file(tmp_path / "saved" / "model.safetensors"))  # tied
    assert sum(parameter.numel() for parameter in module.parameters()) == engine.flat.numel()
    again = trainer(model)
    again.model.load(tmp_path / "saved")
    torch.testing.assert_close(again.flat, engine.flat, atol=0, rtol=0)
    torch.testing.assert_close(trainer(tmp_path / "saved").logprobs(text), engine.logprobs(text), atol=1e-6, rtol=0)
    written = {path.name for path in (tmp_path / "saved").iterdir()}
    assert ({"processor_config.json", "preprocessor_config.json"} <= written) is (name == "llava")


def test_placeholders_without_an_image_are_not_trained_on(llava: Path) -> None:
    ids = np.array([20, *image_ids(llava), 30])
    with pytest.raises(RequestError, match="0 images need 0 placeholder tokens, input_ids hold 16"):
        trainer(llava).logprobs(TokenBatch([Span(ids, np.array([17]), 0)], torch.ones(1)))


def test_weights_that_are_missing_are_named(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    model = write_gpt2(tmp_path / "gpt2")
    tensors = load_file(model / "model.safetensors")
    del tensors["transformer.h.1.ln_2.bias"]
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"lack transformer\.h\.1\.ln_2\.bias"):
        open_trainable(model)


def test_an_unknown_model_type_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "abacus"}')
    with pytest.raises(ModelError, match="transformers cannot read the model"):
        max_positions(tmp_path)


def test_how_long_a_sequence_may_be_is_read_from_the_config(llava: Path, tmp_path: Path) -> None:
    assert max_positions(llava) == 2048
    assert max_positions(write_gpt2(tmp_path)) == 512
    assert vocab_size(llava) == open_runner(llava).vocab_size
    assert vocab_size(tmp_path) == open_runner(tmp_path).vocab_size


def test_what_transformers_computes_is_float32_and_keeps_its_activations(tmp_path: Path) -> None:
    model = write_gpt2(tmp_path / "gpt2")
    with pytest.raises(ConfigError, match=r"gpt2 is computed by transformers in float32, got rollout\.dtype=bfloat16"):
        open_runner(model, "bfloat16")
    with pytest.raises(ConfigError, match=r"lower actor\.max_tokens_per_mb"):
        open_trainable(model, gradient_checkpointing=True)


def test_a_frozen_model_has_no_gradient_and_the_same_log_probs(llava: Path) -> None:
    frozen = open_trainable(llava, frozen=True)
    assert frozen.flat_grad is None
    assert not any(tensor.requires_grad for _, tensor in frozen.named_weights())
    torch.testing.assert_close(ScoringEngine(frozen).logprobs(batch(llava)), trainer(llava).logprobs(batch(llava)))
