"""A broken model directory is reported in one line that names the problem."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import TINY, training_engine

from areal.api.errors import ModelError
from areal.engine.model.architecture import read_architecture
from areal.engine.model.decoder import Decoder
from areal.engine.model.weights import load_weights
from areal.engine.models import find_model

pytestmark = pytest.mark.slow


@pytest.fixture
def model(tmp_path: Path) -> Path:
    training_engine().save(str(tmp_path))
    return tmp_path


def change_config(model: Path, **changes: Any) -> None:
    file = model / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gemma3"}, r"model type 'gemma3' in .* cannot be run; the families are llama, qwen2, qwen3"),
        ({"use_sliding_window": True}, r"use_sliding_window=True"),
        ({"hidden_act": "gelu"}, r"hidden_act='gelu' in .* only hidden_act='silu' can"),
        ({"mlp_bias": True}, r"mlp_bias=True"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, r"rotary scaling 'yarn' .* default, llama3"),
    ],
)
def test_what_the_decoder_cannot_compute_is_refused_by_name(model: Path, changes: dict[str, Any], message: str) -> None:
    change_config(model, **changes)
    with pytest.raises(ModelError, match=message):
        read_architecture(model)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not valid JSON"),
        ("[]", "must hold a JSON object, got list"),
        ('{"model_type": "llama"}', "lacks 'num_attention_heads'"),
    ],
)
def test_a_broken_config_is_named(model: Path, text: str, message: str) -> None:
    (model / "config.json").write_text(text)
    with pytest.raises(ModelError, match=rf"config.json {message}"):
        read_architecture(model)


def test_a_directory_without_config_says_what_to_set(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no config.json; set actor.path to"):
        read_architecture(tmp_path)


def load(model: Path) -> None:
    load_weights(Decoder(TINY), model)


def test_missing_weights_are_named(model: Path) -> None:
    file = model / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, file)
    with pytest.raises(ModelError, match=r"lack model\.layers\.1\.mlp\.up_proj\.weight"):
        load(model)


def test_weights_of_another_shape_are_named(model: Path) -> None:
    file = model / "model.safetensors"
    save_file(load_file(file) | {"model.norm.weight": torch.ones(3)}, file)
    with pytest.raises(ModelError, match=r"model\.norm\.weight in .* must have the shape \[16\] .*, got \[3\]"):
        load(model)


def test_a_directory_without_weights_is_refused(model: Path) -> None:
    (model / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"no \*\.safetensors weights in"):
        load(model)


@pytest.mark.parametrize("damage", [lambda data: data[:-100], lambda data: b"", lambda data: b"<html>" * 99])
def test_damaged_weights_name_the_file(model: Path, damage: Any) -> None:
    file = model / "model.safetensors"
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(ModelError, match=r"cannot read the weights in '.*model\.safetensors'"):
        load(model)


def test_an_index_that_names_an_absent_file_is_refused(model: Path) -> None:
    names = load_file(model / "model.safetensors")
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict.fromkeys(names, "gone")}))
    with pytest.raises(ModelError, match=r"cannot read the weights in '.*gone'"):
        load(model)


def test_an_index_that_is_none_is_refused(model: Path) -> None:
    (model / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ModelError, match="must hold a weight_map"):
        load(model)


def test_a_directory_is_its_own_model(model: Path) -> None:
    assert find_model(str(model)) == model


@pytest.mark.parametrize("path", ["/nowhere/model", "./nowhere", "~/nowhere-at-all", "nowhere", "a/b/c"])
def test_a_missing_directory_is_refused_without_asking_the_hub(path: str) -> None:
    with pytest.raises(ModelError, match=r"no model directory at .*; name one"):
        find_model(path)


def test_an_unknown_builtin_model_lists_the_known() -> None:
    with pytest.raises(ModelError, match="no built-in model 'huge'; use one of tiny-math"):
        find_model("builtin:huge")


def test_an_id_that_the_hub_does_not_give_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def refuse(*_: Any, **__: Any) -> str:
        raise OSError("offline\nand much more")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(
        ModelError, match=r"^no directory 'some/model' here, and it cannot be downloaded from the model hub: offline$"
    ):
        find_model("some/model")


def test_directory_of_a_run_stands_for_its_newest_model(tmp_path: Path) -> None:
    for name in ("step-000009", "step-999999", "step-1000000", "damaged-step-1000001", "step-1000002.tmp"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    assert find_model(str(tmp_path)) == tmp_path / "checkpoints/step-1000000"
