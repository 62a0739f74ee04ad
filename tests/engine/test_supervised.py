"""Conversations as supervised examples: exactly the assistant's turns are learned."""

from typing import Any

import pytest
from tiny_models import byte_tokenizer, training_engine

from areal.api.errors import ModelError
from areal.engine.builtin.text import CALCULATOR_TOOLS
from areal.engine.training.supervised import mean_nll, supervised_batch, supervised_span

pytestmark = pytest.mark.slow

CONVERSATION: list[dict[str, Any]] = [
    {"role": "user", "content": "Sort 21"},
    {"role": "assistant", "content": "21"},
    {"role": "user", "content": "That is wrong."},
    {"role": "assistant", "content": "12"},
]


def learned(messages: list[dict[str, Any]], tools: Any = None) -> list[str]:
    """The learned pieces of text."""
    tokenizer = byte_tokenizer()
    span = supervised_span(messages, tools, tokenizer, group=0)
    assert tokenizer.decode(span.ids) == tokenizer.apply_chat_template(messages, tools=tools, tokenize=False).rstrip()
    text = ""
    for place in range(len(span.ids)):
        text += tokenizer.decode(span.ids[place]) if place in span.asked else "\0"
    return [stretch for stretch in text.split("\0") if stretch]


@pytest.mark.parametrize("tools", [None, CALCULATOR_TOOLS])
def test_every_turn_of_the_assistant_is_learned_with_its_end(tools: Any) -> None:
    assert learned(CONVERSATION, tools) == ["21<|im_end|>", "12<|im_end|>"]


def test_a_turn_that_is_not_to_be_learned_is_given() -> None:
    wrong = CONVERSATION[1] | {"learn": False}
    assert learned([CONVERSATION[0], wrong, *CONVERSATION[2:]]) == ["12<|im_end|>"]


def test_a_batch_weighs_every_learned_token_the_same() -> None:
    batch = supervised_batch([(CONVERSATION, None), (CONVERSATION[:2], None)], byte_tokenizer())
    assert len(batch.temperatures) == 9
    assert batch.fields["weights"].tolist() == pytest.approx([1 / 9] * 9)
    engine = training_engine()
    figures = engine.train_batch(batch, mean_nll)
    assert figures["loss"] > 0
    assert engine.train_batch(batch, mean_nll)["loss"] < figures["loss"]


class Forgetful:
    """A template that drops what the assistant said before the last turn."""

    def __init__(self) -> None:
        self._tokenizer = byte_tokenizer()

    def encode(self, text: str, **options: Any) -> Any:
        return self._tokenizer.encode(text, **options)

    def apply_chat_template(self, messages: list[dict[str, Any]], **options: Any) -> Any:
        last = len(messages) - 1
        kept = [m if m["role"] == "user" or i == last else m | {"content": ""} for i, m in enumerate(messages)]
        return self._tokenizer.apply_chat_template(kept, **options)


def test_a_template_that_rewrites_earlier_turns_is_refused_with_the_remedy() -> None:
    with pytest.raises(ModelError, match='"learn": false'):
        supervised_span(CONVERSATION, None, Forgetful(), group=0)
    given = [CONVERSATION[0], CONVERSATION[1] | {"learn": False}, *CONVERSATION[2:]]
    span = supervised_span(given, None, Forgetful(), group=0)
    assert byte_tokenizer().decode(span.ids[span.asked]) == "12<|im_end|>"
