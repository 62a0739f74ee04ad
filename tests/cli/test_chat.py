import io
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from areal.api.errors import ContextLengthError
from areal.cli import chat as verb
from areal.cli.main import main
from areal.config.training import OptimizerConfig
from areal.engine.builtin.tokenizer import make_tokenizer
from areal.engine.inference.fake import FakeEngine
from areal.engine.model.architecture import Architecture
from areal.engine.model.decoder import initialise
from areal.engine.training.engine import TrainingEngine
from areal.trajectory import Renderer

pytestmark = pytest.mark.slow

MAX_POSITIONS = 256


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return make_tokenizer(["Sort 5291 and say hello again."], 300, MAX_POSITIONS)


@pytest.fixture(scope="module")
def model_dir(tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model that never learned anything, saved as training saves one."""
    directory = tmp_path_factory.mktemp("model")
    shape = Architecture(
        family="qwen3",
        vocab_size=len(tokenizer),
        hidden_size=16,
        num_layers=1,
        num_heads=2,
        num_kv_heads=1,
        head_dim=8,
        intermediate_size=16,
        max_positions=MAX_POSITIONS,
        tied_embeddings=True,
    )
    engine = TrainingEngine(shape, OptimizerConfig(), total_steps=1)
    initialise(engine.decoder, torch.Generator().manual_seed(1))
    engine.save(str(directory))
    tokenizer.save_pretrained(directory)
    return str(directory)


def say(monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    """Put lines into standard input, which is no terminal."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def fake_chat(tokenizer: Any, *answers: str, max_positions: int = MAX_POSITIONS) -> verb.Chat:
    """A chat with an engine that says `answers`, one after the other."""
    left = iter(answers)
    engine = FakeEngine(
        vocab_size=len(tokenizer),
        max_positions=max_positions,
        script=lambda ids: [*tokenizer.encode(next(left)), tokenizer.eos_token_id],
    )
    return verb.Chat(engine, Renderer(tokenizer), max_positions)


def use(monkeypatch: pytest.MonkeyPatch, chat: verb.Chat) -> None:
    monkeypatch.setattr(verb, "open_chat", lambda model: chat)


def test_saved_model_answers_one_line_for_each_piped_line(
    model_dir: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    say(monkeypatch, "Sort 5291", "/reset", "Sort 5291")
    assert main(["chat", model_dir]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first
    assert first == second, "greedy answers to the same words are the same"


@pytest.mark.parametrize("directory", ["nowhere", "/nowhere/at/all", "builtin:nothing"])
def test_missing_model_is_one_line_and_code_2(directory: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", directory]) == 2
    said = capsys.readouterr().err
    assert said.startswith("areal: ")
    assert said.count("\n") == 1


def test_directory_without_a_tokenizer_is_one_line_and_code_2(
    model_dir: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text((Path(model_dir) / "config.json").read_text())
    assert main(["chat", str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_empty_input_ends_at_once(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use(monkeypatch, fake_chat(tokenizer))
    say(monkeypatch)
    assert main(["chat", "fake"]) == 0
    assert capsys.readouterr().out == ""


def test_quit_ends_before_later_lines(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use(monkeypatch, fake_chat(tokenizer, "1259"))
    say(monkeypatch, "Sort 5291", "", "/quit", "Sort 5291")
    assert main(["chat", "fake"]) == 0
    assert capsys.readouterr().out == "1259\n"


def test_control_characters_and_line_breaks_are_shown_not_obeyed(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use(monkeypatch, fake_chat(tokenizer, "a\nb\x1b[31m"))
    say(monkeypatch, "hello")
    assert main(["chat", "fake"]) == 0
    assert capsys.readouterr().out == "a\\nb�[31m\n"


def test_terminal_gets_a_prompt_and_ends_at_the_end_of_input(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use(monkeypatch, fake_chat(tokenizer, "1259\nand so on"))
    monkeypatch.setattr(sys, "stdin", Terminal("Sort 5291\n"))
    assert main(["chat", "fake"]) == 0
    shown = capsys.readouterr().out
    assert "greedy" in shown
    assert shown.count("you> ") == 2
    assert "1259\nand so on\n" in shown


def test_terminal_answers_a_word_that_is_no_command_itself(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use(monkeypatch, fake_chat(tokenizer, "a path"))
    monkeypatch.setattr(sys, "stdin", Terminal("/help\n/etc/hosts is what?\n"))
    assert main(["chat", "fake"]) == 0
    shown = capsys.readouterr()
    assert shown.err == "areal: no command /help; /reset starts a new conversation, /quit ends\n"
    assert "a path\n" in shown.out


def test_ctrl_c_ends_cleanly(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Interrupted(Terminal):
        def readline(self, size: int | None = -1, /) -> str:
            raise KeyboardInterrupt

    use(monkeypatch, fake_chat(tokenizer))
    monkeypatch.setattr(sys, "stdin", Interrupted())
    assert main(["chat", "fake"]) == 0
    assert "Traceback" not in capsys.readouterr().err


async def test_second_turn_continues_the_tokens_of_the_first(tokenizer: Any) -> None:
    chat = fake_chat(tokenizer, "1259", "again")
    first, second = await chat.ask("Sort 5291"), await chat.ask("Sort it again")
    assert second.extends
    assert chat.tree.token_ids(second)[: len(chat.tree.token_ids(first))] == chat.tree.token_ids(first)
    assert [message["content"] for message in chat.messages] == ["Sort 5291", "1259", "Sort it again", "again"]


async def test_conversation_that_fills_the_model_is_refused_with_the_remedy_and_kept(tokenizer: Any) -> None:
    chat = fake_chat(tokenizer, "1259", max_positions=40)
    await chat.ask("5")
    before = list(chat.messages)
    with pytest.raises(ContextLengthError, match="/reset"):
        await chat.ask("Sort 5291 " * 20)
    assert chat.messages == before


def test_terminal_survives_a_message_that_is_too_long(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use(monkeypatch, fake_chat(tokenizer, "1259", max_positions=40))
    monkeypatch.setattr(sys, "stdin", Terminal("Sort 5291 " * 20 + "\n5\n"))
    assert main(["chat", "fake"]) == 0
    shown = capsys.readouterr()
    assert "/reset" in shown.err
    assert "1259" in shown.out
