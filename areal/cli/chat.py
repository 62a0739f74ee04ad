"""`areal chat MODEL`: talk to a model in the terminal.

Answers are greedy, the likeliest token each time, so the same words get the same answer. In a terminal it is a prompt
loop; reading from a pipe, it writes exactly one line for each line it reads. Either way the lines form one conversation
until `/reset`. Control characters in the model's output are made visible and have no effect on the terminal.
"""

import argparse
import asyncio
import contextlib
import importlib
import io
import sys
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from areal.api.engine_api import InferenceEngine
from areal.api.errors import ContextLengthError, ModelError, RequestError
from areal.api.io_struct import ModelRequest
from areal.config.rollout import GenerationHyperparameters
from areal.trajectory import Renderer, Tree
from areal.trajectory.answer import read_answer
from areal.trajectory.message import Message
from areal.trajectory.tree import Completion
from areal.utils.shorten import first_line, printable

PROMPT = "you> "
COMMANDS = "/reset starts a new conversation, /quit ends"
MAX_ANSWER_TOKENS = 512


@dataclass
class Chat:
    """One conversation with an engine. Each prompt is the ids of the conversation so far, followed by the new ones."""

    engine: InferenceEngine
    renderer: Renderer
    max_positions: int
    tree: Tree = field(init=False)
    messages: list[Message] = field(init=False)

    def __post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.tree = Tree(self.renderer)
        self.messages = []

    async def ask(self, text: str) -> Completion:
        """The answer to one more message. A message that cannot be answered leaves the conversation as it was."""
        messages = [*self.messages, {"role": "user", "content": text}]
        prompt = self.tree.prompt(messages)
        sampling = self._sampling(len(prompt.ids))
        name = uuid.uuid4().hex
        response = await self.engine.agenerate(ModelRequest(name, prompt.ids, sampling))
        answer = read_answer(self.renderer, response, completion_id=name, stop_ids=sampling.stop_token_ids)
        self.messages = [*messages, answer.message]
        return self.tree.add(prompt, response, answer, completion_id=name, temperature=1.0)

    def _sampling(self, prompt_length: int) -> GenerationHyperparameters:
        room = self.max_positions - prompt_length
        if room < 1:
            raise ContextLengthError(
                f"the model has {self.max_positions} positions and the conversation takes {prompt_length} tokens; "
                "start over with /reset"
            )
        greedy = GenerationHyperparameters(greedy=True, max_new_tokens=min(MAX_ANSWER_TOKENS, room))
        ending = greedy.new_with_stop_and_pad_token_ids(self.renderer.tokenizer)
        return ending.new(stop_token_ids=[*ending.stop_token_ids, *self.renderer.turn_end_ids])


def run(args: argparse.Namespace) -> int:
    """Ends at /quit, at the end of input, or with Ctrl-C."""
    chat = open_chat(args.model)
    for stream in (sys.stdin, sys.stdout):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # bytes that are not text must not end a conversation
    with asyncio.Runner() as runner:
        try:
            _talk(chat, runner, sys.stdin.isatty())
        except KeyboardInterrupt:
            print()
        finally:
            runner.run(chat.engine.aclose())
    return 0


def open_chat(model: str) -> Chat:
    """`model` is a directory, `builtin:NAME` or a Hugging Face id."""
    from areal.trainer.display import Announcer, waiting

    with waiting("loading torch"):
        from areal.engine.inference.server import load_engine
        from areal.engine.models import find_model, max_positions, tokenizer_files
    with Announcer() as report:
        directory = find_model(model, report)
    positions = max_positions(directory)  # first, because a directory without a model is told best by it
    with waiting(f"loading {model}"):
        renderer = _renderer(tokenizer_files(directory))
        return Chat(load_engine(directory), renderer, positions)


def _renderer(directory: Path) -> Renderer:
    from areal.utils.hf_utils import load_hf_tokenizer

    try:
        return Renderer(load_hf_tokenizer(directory))
    except (OSError, ValueError) as error:  # transformers raises either for files that are missing or broken
        raise ModelError(
            f"no tokenizer in {str(directory)!r}: {first_line(error)}; save the model's own there"
        ) from error


def _talk(chat: Chat, runner: asyncio.Runner, in_terminal: bool) -> None:
    if in_terminal:
        print(f"Answers are greedy. {COMMANDS}.")
    for line in _typed_lines() if in_terminal else _piped_lines():
        if line == "/quit":
            return
        if line == "/reset":
            chat.reset()
        elif in_terminal and line.startswith("/") and line[1:].isalpha():  # one word: meant for us, not for the model
            print(f"areal: no command {line}; {COMMANDS}", file=sys.stderr)
        elif line:
            _answer(chat, runner, line, in_terminal)


def _answer(chat: Chat, runner: asyncio.Runner, line: str, in_terminal: bool) -> None:
    try:
        completion = runner.run(chat.ask(line))
    except RequestError as error:
        if not in_terminal:
            raise
        print(f"areal: {error}", file=sys.stderr)
        return
    print(_printable(completion.message["content"], one_line=not in_terminal), flush=True)
    if completion.truncated:
        print(f"areal: the answer was cut off at {len(completion.output_ids)} tokens", file=sys.stderr)


def _typed_lines() -> Iterator[str]:
    with contextlib.suppress(ImportError):  # some systems lack it, and then there is no line editing
        importlib.import_module("readline")
    with contextlib.suppress(EOFError):
        while True:
            yield input(PROMPT).strip()
    print()


def _piped_lines() -> Iterator[str]:
    for line in sys.stdin:
        yield line.strip()


def _printable(text: str, one_line: bool) -> str:
    return printable(text.replace("\n", "\\n") if one_line else text)
