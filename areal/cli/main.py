"""The `areal` command line: which verbs there are and what words each takes.

A verb's work lives in `areal/cli/VERB.py` as `run(args) -> int` and is imported only when it is called, so help answers
at once and loads no torch. Nothing is done here.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module

from areal import __version__
from areal.cli.exit import guard


@dataclass(frozen=True)
class Verb:
    summary: str
    declare: Callable[[argparse.ArgumentParser], None]
    """Adds the verb's words to its parser."""
    example: str


def _declare_train(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", metavar="FILE", help="YAML file with the settings")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="a setting that wins over the file's")


def _declare_chat(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", metavar="DIR", help="a saved model: the path that training printed at its end")


def _declare_serve(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="builtin:tiny-math", help="a saved model, builtin:NAME or a hub id")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; beyond loopback it needs --api-key")
    parser.add_argument("--port", type=int, default=8000, help="0 = a free one")
    parser.add_argument("--api-key", metavar="KEY", help="what clients must send; without it one is made and printed")


VERBS = {
    "train": Verb(
        "train an agent's model",
        _declare_train,
        "areal train --config examples/agent_workflow/config.yaml seed=2",
    ),
    "serve": Verb(
        "serve a model to any client of OpenAI's or Anthropic's wire",
        _declare_serve,
        "areal serve --model builtin:tiny-math --port 8000 --api-key KEY",
    ),
    "chat": Verb("talk to a saved model in the terminal", _declare_chat, "areal chat DIR"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """The console script; returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    name, rest = _split_verb(words)
    args = _verb_parser(name).parse_intermixed_args(rest)
    return guard(_run, name, args)


def _run(name: str, args: argparse.Namespace) -> int:
    code: int = import_module(f"{__package__}.{name}").run(args)
    return code


def _split_verb(words: list[str]) -> tuple[str, list[str]]:
    parser = argparse.ArgumentParser(
        prog="areal",
        description="Train language-model agents with asynchronous reinforcement learning.",
        epilog="verbs:\n" + "\n".join(f"  {name:<8}{verb.summary}" for name, verb in VERBS.items())
        + "\n\nareal VERB --help says more.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--version", action="version", version=f"areal {__version__}")
    parser.add_argument("verb", choices=VERBS, metavar="VERB", help=" or ".join(VERBS))
    name: str = parser.parse_args(words[:1]).verb
    return name, words[1:]


def _verb_parser(name: str) -> argparse.ArgumentParser:
    verb = VERBS[name]
    parser = argparse.ArgumentParser(
        prog=f"areal {name}", description=f"{verb.summary.capitalize()}.", epilog=f"example: {verb.example}"
    )
    verb.declare(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
