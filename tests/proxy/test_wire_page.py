"""docs/wire.md says of every field what the dialects do with it."""

import re
from pathlib import Path
from typing import Any

import pytest
from anthropic.types import message_create_params
from openai.types import completion_create_params as completion_params
from openai.types.chat import completion_create_params as chat_params
from openai.types.responses import response_create_params

from areal.proxy.dialects import anthropic, base, chat, completions, responses

PAGE = (Path(__file__).parents[2] / "docs/wire.md").read_text(encoding="utf-8")
ROW = re.compile(r"^\| `(\w+)` \| (honoured|ignored|refused) \|", re.MULTILINE)
DIALECTS: dict[str, tuple[Any, Any]] = {
    "Chat Completions": (chat, chat_params.CompletionCreateParamsBase),
    "Completions": (completions, completion_params.CompletionCreateParamsBase),
    "Responses": (responses, response_create_params.ResponseCreateParamsBase),
    "Messages": (anthropic, message_create_params.MessageCreateParamsBase),
}


@pytest.mark.parametrize("name", DIALECTS)
def test_the_page_says_of_every_field_what_the_dialect_does_with_it(name):
    dialect, params = DIALECTS[name]
    section = PAGE.partition(f"\n## {name}\n")[2].partition("\n## ")[0]
    told = dict(ROW.findall(section))
    assert len(told) == len(ROW.findall(section)), "a field has one row"
    own = getattr(dialect, "HARMLESS", frozenset())
    known = dialect.HONOURED | own | dialect.MEANINGLESS.keys() | params.__annotations__.keys()
    assert told.keys() == known
    for field, state in told.items():
        ignored = field in own or field in base.HARMLESS
        expected = "honoured" if field in dialect.HONOURED else "ignored" if ignored else "refused"
        assert state == expected, field
