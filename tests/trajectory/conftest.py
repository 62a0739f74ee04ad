from collections.abc import Callable

import pytest
from chat_tokenizers import chat_tokenizer
from scripted_talk import Talk

from areal.trajectory import Renderer, Tree


@pytest.fixture
def talk() -> Callable[[str], Talk]:
    return lambda style="chatml": Talk(Tree(Renderer(chat_tokenizer(style))))
