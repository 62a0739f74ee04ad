"""The built-in model: made once, and fit for every kind of agent."""

import asyncio
import os
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from areal.api.io_struct import ModelRequest
from areal.config.rollout import GenerationHyperparameters
from areal.dataset.builtin import TASKS, Problem, split_of
from areal.engine.builtin.text import CALCULATOR_TOOLS, TINY_MATH, math_lessons
from areal.engine.inference.server import load_engine
from areal.engine.model.architecture import read_architecture
from areal.utils.hf_utils import load_hf_tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # the first of them may have to make the model

CONVERSATION: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Sort 5291"},
    {"role": "assistant", "content": "1295"},
    {"role": "user", "content": "That is wrong. Try again."},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}],
    },
    {"role": "tool", "content": "3"},
    {"role": "assistant", "content": "1259"},
]

MAKE_QUICKLY = """
from dataclasses import replace
from areal.engine.builtin.text import TINY_MATH
quick = replace(TINY_MATH, max_steps=1)  # how well it is warmed up does not matter here
print(quick.cached(lambda text: None))
"""


@pytest.fixture(scope="session")
def tokenizer(tiny_math: Path) -> Any:
    return load_hf_tokenizer(tiny_math)


async def make_in_a_process(cache: Path) -> str:
    paths = ":".join(path for path in sys.path if path)
    environment = os.environ | {"AREAL_CACHE": str(cache), "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", MAKE_QUICKLY, env=environment, stdout=asyncio.subprocess.PIPE
    )
    output, _ = await asyncio.wait_for(process.communicate(), 100)
    assert process.returncode == 0
    return output.decode().strip()


async def test_two_processes_that_make_it_at_once_end_with_one_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = await asyncio.gather(make_in_a_process(tmp_path), make_in_a_process(tmp_path))
    assert first == second
    assert os.listdir(tmp_path) == [os.path.basename(first)]
    monkeypatch.setenv("AREAL_CACHE", str(tmp_path))
    assert TINY_MATH.cached(pytest.fail) == Path(first)


async def test_it_begins_between_knowing_nothing_and_everything(tiny_math: Path, tokenizer: Any) -> None:
    engine = load_engine(tiny_math)
    problems = list(islice(TASKS["sort-digits"].problems("test"), 256))
    g = GenerationHyperparameters(max_new_tokens=8, stop_token_ids=[tokenizer.eos_token_id])
    answers = await asyncio.gather(
        *(engine.agenerate(request(tokenizer, problem, g.new(seed=i))) for i, problem in enumerate(problems))
    )
    right = [
        tokenizer.decode(answer.output_tokens, skip_special_tokens=True) == problem.answer
        for answer, problem in zip(answers, problems, strict=True)
    ]
    await engine.aclose()
    assert 0.2 < sum(right) / len(right) < 0.6


def request(tokenizer: Any, problem: Problem, gconfig: GenerationHyperparameters) -> ModelRequest:
    ids = tokenizer.apply_chat_template(problem.as_task()["messages"], add_generation_prompt=True)
    return ModelRequest("r", ids, gconfig)


def test_it_has_room_for_tool_schemas(tiny_math: Path, tokenizer: Any) -> None:
    assert read_architecture(tiny_math).max_positions >= 8192
    assert read_architecture(tiny_math).eos_token_ids == (tokenizer.eos_token_id,)
    assert len(tokenizer) <= read_architecture(tiny_math).vocab_size


def test_transformers_loads_it(tiny_math: Path) -> None:
    from transformers import AutoModelForCausalLM

    _, info = AutoModelForCausalLM.from_pretrained(tiny_math, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]


@pytest.mark.parametrize("tools", [None, CALCULATOR_TOOLS])
@pytest.mark.parametrize("begin", [0, 1])
def test_its_template_only_ever_appends(tokenizer: Any, tools: Any, begin: int) -> None:
    messages = CONVERSATION[begin:]

    def render(count: int, **options: Any) -> str:
        return str(tokenizer.apply_chat_template(messages[:count], tools=tools, tokenize=False, **options))

    for count in range(1, len(messages)):
        assert render(count + 1).startswith(render(count))
        if messages[count]["role"] == "assistant":
            assert render(count + 1).startswith(render(count, add_generation_prompt=True))


def test_its_template_shows_tools_calls_and_results(tokenizer: Any) -> None:
    text = tokenizer.apply_chat_template(CONVERSATION, tools=CALCULATOR_TOOLS, tokenize=False)
    assert text.count("Be brief.") == 1
    assert '"name": "multiply"' in text
    assert '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call><|im_end|>' in text
    assert "<|im_start|>tool\n3<|im_end|>" in text
    as_dict = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "", "tool_calls": [{"name": "add", "arguments": {"a": 1}}]},
    ]
    assert '{"name": "add", "arguments": {"a": 1}}' in tokenizer.apply_chat_template(as_dict, tokenize=False)


@pytest.mark.parametrize("text", ["Sort 5291", "café ☕ 数学\n\n\ttabs", "<tool_call>", ""])
def test_its_tokenizer_writes_back_what_it_reads(tokenizer: Any, text: str) -> None:
    assert tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=False) == text


def test_digits_are_single_tokens(tokenizer: Any) -> None:
    assert len(tokenizer("5291")["input_ids"]) == 4


def test_lessons_use_training_problems_only() -> None:
    asked = [messages[0]["content"] for messages, _ in islice(math_lessons(20), 2000)]
    assert {split_of(Problem(question, "")) for question in asked} == {"train"}
