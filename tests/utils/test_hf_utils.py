"""A loaded tokenizer gives plain lists of ids, also after it has travelled; a processor comes where there is one."""

import shutil
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from tiny_processor import TOKENS_PER_IMAGE, png

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


def test_a_built_in_name_is_refused_with_the_call_that_finds_its_directory() -> None:
    with pytest.raises(
        ValueError, match=r"'builtin:tiny-math'; use load_hf_tokenizer\(find_model\('builtin:tiny-math'\)\)"
    ):
        load_hf_tokenizer("builtin:tiny-math")
