import pytest

from areal.trajectory.forks import continuations
from areal.trajectory.rendering import Renderer
from tests.trajectory.chat_tokenizers import STYLES, chat_tokenizer


def found(style: str) -> dict[str, bool | None]:
    return {each.name: each.appends for each in continuations(Renderer(chat_tokenizer(style)))}


def test_a_template_that_keeps_everything_appends() -> None:
    assert found("chatml") == {"a question": True, "a tool's result": True}


def test_a_template_that_drops_earlier_thinking_forks_at_the_next_question_only() -> None:
    assert found("qwen3") == {
        "a question": True,
        "a tool's result": True,
        "a question after thinking": False,
        "a tool's result after thinking": True,
    }


@pytest.mark.parametrize("style", sorted(STYLES))
def test_every_style_has_an_answer_to_a_plain_question(style: str) -> None:
    assert found(style)["a question"] is not None
