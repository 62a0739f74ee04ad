"""A loaded tokenizer gives plain lists of ids, also after it has travelled; a processor comes where there is one."""

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from tiny_processor import TOKENS_PER_IMAGE, png

from areal.api.cli_args import GRPOConfig, load_expr_config
from areal.engine.builtin.tokenizer import make_tokenizer
from areal.utils.hf_utils import load_hf_processor, load_hf_tokenizer
from areal.utils.images import decode_image

MESSAGES = [{"role": "user", "content": "Sort 5291"}]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(["Sort 5291"], 261, 512).save_pretrained(directory)
    return directory


def check(tokenizer: Any) -> None:
    ids = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True)
    assert isinstance(ids, list)
    assert all(isinstance(token, int) for token in ids)
    text = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, tokenize=False)
    assert tokenizer.decode(ids) == text == "<|im_start|>user\nSort 5291<|im_end|>\n<|im_start|>assistant\n"


def test_a_chat_template_gives_a_plain_list_of_ids(directory: Path) -> None:
    check(load_hf_tokenizer(directory))
    check(load_hf_tokenizer(str(directory)))


def test_who_asks_for_a_dict_gets_one(directory: Path) -> None:
    encoded = load_hf_tokenizer(directory).apply_chat_template(MESSAGES, return_dict=True)
    assert set(encoded) >= {"input_ids", "attention_mask"}


def test_it_stays_so_after_pickling_and_after_saving(directory: Path, tmp_path: Path) -> None:
    tokenizer = load_hf_tokenizer(directory)
    check(cloudpickle.loads(cloudpickle.dumps(tokenizer)))
    tokenizer.save_pretrained(tmp_path)
    check(load_hf_tokenizer(tmp_path))


def test_processor_takes_images_and_its_tokenizer_gives_plain_lists(vision_directory: Path) -> None:
    processor = load_hf_processor(vision_directory)
    ids = processor.tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True)
    assert isinstance(ids, list)
    shown = processor(text=["<image>"], images=[decode_image(png())])
    assert len(shown["input_ids"][0]) == TOKENS_PER_IMAGE


def test_directory_without_a_processor_has_none(directory: Path, tmp_path: Path) -> None:
    assert load_hf_processor(directory) is None
    assert load_hf_processor(tmp_path / "not there") is None


def test_processor_that_cannot_be_loaded_says_what_to_do(directory: Path, tmp_path: Path) -> None:
    shutil.copytree(directory, tmp_path, dirs_exist_ok=True)
    (tmp_path / "processor_config.json").write_text('{"processor_class": "Qwen2VLProcessor"}')
    with pytest.raises(ValueError, match=r"cannot be loaded: .*; install what it names"):
        load_hf_processor(tmp_path)


def test_tokenizer_of_the_default_config_is_loaded_before_its_model_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AREAL_CACHE", str(tmp_path))
    config, _ = load_expr_config([], GRPOConfig)
    check(load_hf_tokenizer(config.tokenizer_path))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["tiny-math", "tiny-countdown", "tiny-vision"])
def test_every_built_in_model_has_its_tokenizer(name: str) -> None:
    check(load_hf_tokenizer(f"builtin:{name}"))


def test_built_in_vision_model_has_its_processor_and_the_others_have_none() -> None:
    shown = load_hf_processor("builtin:tiny-vision")(text=["<image>"], images=[decode_image(png())])
    assert len(shown["input_ids"][0]) > 1
    assert load_hf_processor("builtin:tiny-math") is None


@pytest.mark.parametrize("load", [load_hf_tokenizer, load_hf_processor])
@pytest.mark.parametrize("name", ["tiny-maths", "", "../builtin_tokenizers/tiny-math"])
def test_unknown_built_in_name_is_refused_with_those_there_are(load: Callable[[str], Any], name: str) -> None:
    known = "builtin:tiny-countdown, builtin:tiny-math, builtin:tiny-vision"
    with pytest.raises(ValueError, match=f"^no built-in model {name!r}; use one of {known}$"):
        load(f"builtin:{name}")


@pytest.mark.slow
def test_tokenizers_are_loaded_without_torch() -> None:
    code = (
        "import sys; from areal.utils.hf_utils import load_hf_tokenizer; load_hf_tokenizer('builtin:tiny-math'); "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
