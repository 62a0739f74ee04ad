from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from agent_stage import Speaker, math_tokenizer, open_stage


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return math_tokenizer()


@pytest.fixture
def speaker(tokenizer: Any) -> Callable[[Callable[[str], str]], Speaker]:
    return lambda answer: Speaker(tokenizer, answer)


@pytest.fixture
def stage(tokenizer: Any) -> Any:
    """`async with stage(answer) as s`: a proxy whose model answers a prompt's text with `answer(text)`."""
    return partial(open_stage, tokenizer, constrained=False)
