from functools import partial
from typing import Any

import pytest
from agent_stage import math_tokenizer, open_stage


@pytest.fixture
def stage() -> Any:
    """`async with stage(answer) as s`: a proxy whose model answers a prompt's text with `answer(text)`.

    With `constrained=False` it may say what the request forbids.
    """
    return partial(open_stage, math_tokenizer())
