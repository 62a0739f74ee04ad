"""The shipped tokenizers answer without transformers exactly what transformers' tokenizer of the same files answers."""

import json
import pickle
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from areal.utils.hf_utils import load_hf_tokenizer
from areal.utils.shipped_tokenizer import SHIPPED, ShippedTokenizer, shipped_name

NAMES = sorted(each.name for each in SHIPPED.iterdir())
TEXTS = [
    "",
    "Sort 3141",
    " two  spaces\n\tand <|im_end|> <|im_start|>user",
    "<tool_call>\n{}\n</tool_call>",
    "Größe 東京 🙂 \x00 \ufeff e\u0301",
    "<|im_end", "1" * 50,
]  # fmt: skip
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"ü": [1, 2.5, None, True, "<&>"]}}}


@pytest.fixture(params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def full(name: str) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(str(SHIPPED / name))


@pytest.fixture
def light(name: str) -> Any:
    return load_hf_tokenizer(f"builtin:{name}")


def is_light(tokenizer: Any) -> bool:
    return type(tokenizer) is ShippedTokenizer and vars(tokenizer)["_full"] is None


def test_facts_are_those_of_transformers(light: Any, full: Any) -> None:
    for fact in (
        "name_or_path", "chat_template", "model_max_length", "eos_token", "pad_token", "eos_token_id", "pad_token_id",
        "all_special_ids", "added_tokens_decoder",
    ):  # fmt: skip
        assert getattr(light, fact) == getattr(full, fact), fact
    assert len(light) == len(full)
    assert light.backend_tokenizer.to_str() == full.backend_tokenizer.to_str()
    assert is_light(light)


@pytest.mark.parametrize("text", TEXTS)
def test_text_becomes_the_same_ids_and_back(light: Any, full: Any, text: str) -> None:
    for special in (True, False):
        assert light.encode(text, add_special_tokens=special) == full.encode(text, add_special_tokens=special)
    ids = light.encode(text)
    for skip in (True, False):
        assert light.decode(ids, skip_special_tokens=skip) == full.decode(ids, skip_special_tokens=skip)
        assert light.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False) == full.decode(
            ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False
        )
    assert is_light(light)


def test_every_id_is_the_same_token(light: Any, full: Any) -> None:
    ids = list(range(len(full) + 3))
    tokens = light.convert_ids_to_tokens(ids)
    assert tokens == full.convert_ids_to_tokens(ids)
    assert [light.convert_ids_to_tokens(n) for n in ids] == tokens
    assert [light.decode(n) for n in ids] == [full.decode(n) for n in ids]
    known = [token for token in tokens if token is not None]
    assert light.convert_tokens_to_ids([*known, "no such token"]) == full.convert_tokens_to_ids(
        [*known, "no such token"]
    )
    assert light.convert_tokens_to_ids("no such token") == full.convert_tokens_to_ids("no such token")
    assert is_light(light)


def random_content(draw: random.Random, parts: bool) -> Any:
    text = "".join(draw.choice([*TEXTS, "a", " ", "\n", "{{", "%}", "&<>"]) for _ in range(draw.randrange(4)))
    if parts and draw.random() < 0.3:
        return [{"type": "text", "text": text}, {"type": "image"}]
    return text


def random_message(draw: random.Random, parts: bool) -> dict[str, Any]:
    message: dict[str, Any] = {
        "role": draw.choice(["system", "user", "assistant", "tool", "judge"]),
        "content": random_content(draw, parts),
        "name": draw.choice([None, "x", 3]),
    }
    if message["role"] == "assistant" and draw.random() < 0.5:
        arguments = draw.choice(['{"a": 1}', {"a": [1, None, {"ä": 2.5}]}, {}])
        message["tool_calls"] = [{"type": "function", "function": {"name": "add", "arguments": arguments}}]
        message["content"] = draw.choice([None, "", "text"])
    if draw.random() < 0.05:
        del message["content"]
    return message


def outcome(tokenizer: Any, *args: Any, **options: Any) -> Any:
    try:
        return tokenizer.apply_chat_template(*args, return_dict=False, **options)
    except Exception as error:
        return type(error), str(error)


def test_conversations_are_rendered_alike(name: str, light: Any, full: Any) -> None:
    draw = random.Random(1)
    for _ in range(300):
        messages = [random_message(draw, name == "tiny-vision") for _ in range(draw.randrange(1, 6))]
        tools = draw.choice([None, None, [], [TOOL], [TOOL, TOOL]])
        for tokenize in (True, False):
            options = {"tools": tools, "tokenize": tokenize, "add_generation_prompt": draw.random() < 0.5}
            assert outcome(light, messages, **options) == outcome(full, messages, **options)
    assert is_light(light)


def test_what_is_unusual_is_answered_by_transformers(light: Any, full: Any) -> None:
    assert light("Sort 12")["input_ids"] == full("Sort 12")["input_ids"]
    assert not is_light(light)
    assert light.apply_chat_template([{"role": "user", "content": "x"}]) == light.encode(
        "<|im_start|>user\nx<|im_end|>\n"
    )
    assert light.padding_side == full.padding_side
    assert repr(light) == repr(full)
    with pytest.raises(AttributeError, match="nothing_of_the_kind"):
        _ = light.nothing_of_the_kind


def test_batches_and_options_are_transformers_own(light: Any, full: Any) -> None:
    user = [{"role": "user", "content": "Sort 21"}]
    assert light.apply_chat_template([user, user], tokenize=False) == full.apply_chat_template(
        [user, user], tokenize=False
    )
    for options in (
        {"chat_template": "{{ messages[0].content }}"},
        {"documents": []},
        {"continue_final_message": True},
    ):
        assert outcome(light, user, tokenize=False, **options) == outcome(full, user, tokenize=False, **options)
    assert light.apply_chat_template(user, return_dict=True) == full.apply_chat_template(user, return_dict=True)
    assert light.decode([[2, 3], [4]]) == full.decode([[2, 3], [4]])
    assert light.encode("a", "b") == full.encode("a", "b")


def test_an_empty_conversation_is_refused_as_by_transformers(light: Any, full: Any) -> None:
    assert outcome(light, []) == outcome(full, [])


def test_what_a_user_changes_holds_for_every_later_answer(light: Any) -> None:
    light.chat_template = "{{ messages[0].content }}!"
    light.pad_token = light.eos_token
    assert light.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi!"
    assert light.pad_token_id == light.eos_token_id


def test_it_is_a_tokenizer_of_transformers_to_who_asks(light: Any) -> None:
    from transformers import PreTrainedTokenizerBase

    assert isinstance(light, PreTrainedTokenizerBase)


def test_a_copy_and_a_pickle_answer_alike(light: Any) -> None:
    again = pickle.loads(pickle.dumps(light))
    assert is_light(again)
    assert again.name_or_path == light.name_or_path
    light.chat_template = "changed"
    assert pickle.loads(pickle.dumps(light)).chat_template == "changed"


def test_what_is_saved_is_found_again_and_transformers_reads_it(light: Any, full: Any, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    for path in light.save_pretrained(tmp_path / "light"):
        assert Path(path).is_file()
    assert is_light(light)
    full.save_pretrained(tmp_path / "full")
    for directory in (tmp_path / "light", tmp_path / "full"):
        assert shipped_name(directory) == shipped_name(Path(full.name_or_path))
        read = AutoTokenizer.from_pretrained(str(directory))
        assert read.backend_tokenizer.to_str() == full.backend_tokenizer.to_str()
        assert read.chat_template == full.chat_template
    shutil.rmtree(tmp_path / "light")


def test_a_tokenizer_whose_directory_is_gone_goes_on(name: str, tmp_path: Path) -> None:
    shutil.copytree(SHIPPED / name, tmp_path / "copy")
    tokenizer = load_hf_tokenizer(tmp_path / "copy")
    shutil.rmtree(tmp_path / "copy")
    assert tokenizer("a")["input_ids"]
    assert tokenizer.name_or_path == str(tmp_path / "copy")


def change(directory: Path, what: str) -> None:
    settings = json.loads((directory / "tokenizer_config.json").read_text())
    if what == "settings":
        (directory / "tokenizer_config.json").write_text(json.dumps({**settings, "bos_token": "<|im_start|>"}))
    elif what == "template":
        (directory / "chat_template.jinja").write_text("{{ messages[0].content }}")
    elif what == "vocabulary":
        vocabulary = json.loads((directory / "tokenizer.json").read_text())
        vocabulary["truncation"] = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
        (directory / "tokenizer.json").write_text(json.dumps(vocabulary))
    elif what == "no template":
        (directory / "chat_template.jinja").unlink()
    elif what == "broken settings":
        (directory / "tokenizer_config.json").write_text("[]")
    else:
        (directory / "special_tokens_map.json").write_text("{}")


@pytest.mark.parametrize(
    "what", ["settings", "template", "vocabulary", "no template", "broken settings", "another file"]
)
def test_a_tokenizer_that_differs_in_any_file_is_not_taken_for_a_shipped_one(tmp_path: Path, what: str) -> None:
    shutil.copytree(SHIPPED / "tiny-math", tmp_path / "copy")
    assert shipped_name(tmp_path / "copy") == "tiny-math"
    change(tmp_path / "copy", what)
    assert shipped_name(tmp_path / "copy") is None


@pytest.mark.slow
def test_the_usual_questions_load_no_transformers() -> None:
    code = (
        "import sys; from areal.utils.hf_utils import load_hf_tokenizer;"
        "from areal.trajectory.rendering import Renderer;"
        "renderer = Renderer(load_hf_tokenizer('builtin:tiny-math'));"
        "renderer.render([{'role': 'user', 'content': 'hi'}], None); sys.exit('transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
