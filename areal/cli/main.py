"""The `areal` command line: finds the verb, parses its words, and decides how the program ends.

What verbs there are and what each takes is in `verbs.py`. A verb's work is `run(args) -> int` in `areal/cli/VERB.py` or
`areal/cli/VERB/`, imported only when the verb is called, so that help answers at once and loads no torch. An error
meant for the user ends as one line and code 2, Ctrl-C as 130; any other exception is a bug and keeps its traceback.
`CODES` of `parsers.py` has all codes. With `--json` a verb prints its result to `args.stdout`, the real stdout.
"""

import errno
import os
import select
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from importlib import import_module
from typing import NoReturn, ParamSpec, TextIO

from areal import __version__
from areal.cli.parsers import CODES, INTERRUPTED, OUTPUT_CLOSED, USER_ERROR, did_you_mean, verb_parser
from areal.cli.verbs import VERBS
from areal.config.errors import ArealError
from areal.utils.shorten import printable

P = ParamSpec("P")

USAGE = "usage: areal VERB [ARGUMENTS]\n"
OPTIONS = ("--help", "--version")
DISK_REMEDIES = {
    errno.ENOSPC: "free some space, or choose another place",
    errno.EDQUOT: "free some space, or choose another place",
    errno.EROFS: "choose another place",
    errno.EACCES: "ask for the permission, or choose another place",
}
"""What a disk refuses is no bug, whichever verb met it."""


def main(argv: Sequence[str] | None = None) -> int:
    """The console script; returns the exit code."""
    return guard(_run, list(sys.argv[1:] if argv is None else argv))


def guard(main: Callable[P, int | None], *args: P.args, **kwargs: P.kwargs) -> int:
    """Call `main` and return the exit code, for `sys.exit(guard(main, sys.argv[1:]))`."""
    try:
        try:
            return _code_of(main, *args, **kwargs)
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()  # now, because Python complains where nobody reads it any more
    except BrokenPipeError:
        if not _output_is_closed():  # then it was another pipe
            raise
        _write_no_more()
        return OUTPUT_CLOSED
    except OSError as error:
        if error.errno not in DISK_REMEDIES:
            raise
        if error.filename is None:  # then it may be stdout, which is written once more at the end
            _write_no_more()
        what = error.filename2 or error.filename or "the output"
        return _told(f"cannot use {what}: {error.strerror}; {DISK_REMEDIES[error.errno]}")


def _write_no_more() -> None:
    """What is still to be written to stdout is dropped."""
    if sys.stdout is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _output_is_closed() -> bool:
    poll = select.poll()
    poll.register(sys.stdout, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _code_of(main: Callable[P, int | None], *args: P.args, **kwargs: P.kwargs) -> int:
    try:
        return main(*args, **kwargs) or 0
    except ArealError as error:
        return _told(str(error))
    except KeyboardInterrupt:
        print("areal: interrupted", file=sys.stderr)
        return INTERRUPTED


def _told(error: str) -> int:
    """The user has been told of the error that is being handled."""
    if os.environ.get("AREAL_LOG", "").upper() == "DEBUG":
        traceback.print_exc()
    print(f"areal: {printable(error)}", file=sys.stderr)
    return USER_ERROR


def _run(words: list[str]) -> int:
    if words[:1] == ["help"]:
        words = [*words[1:2], "--help"]
    name = _find_verb(words)
    args = verb_parser(name, VERBS[name]).parse_words(words[1:])
    if VERBS[name].imports_user_code and "" not in sys.path:
        sys.path.insert(0, "")  # a console script, unlike python itself, does not look in the current directory
    with _json_alone() if getattr(args, "json", False) else nullcontext(sys.stdout) as args.stdout:
        code: int = import_module(f"{__package__}.{name}").run(args)
    return code


@contextmanager
def _json_alone() -> Iterator[TextIO]:
    """What is written to the result goes to stdout, and nothing else: what users' code prints, here or in other
    processes, goes to stderr meanwhile."""
    stdout, is_ours = sys.stdout, sys.stdout is sys.__stdout__
    if stdout is None:  # it was closed from the start
        with open(os.devnull, "w", encoding="utf-8") as nowhere:
            yield nowhere
    elif not is_ours:  # somebody's own, who has no other processes in mind
        with redirect_stdout(sys.stderr):
            yield stdout
    else:
        stdout.flush()
        with os.fdopen(os.dup(stdout.fileno()), "w", encoding="utf-8") as result:
            os.dup2(sys.stderr.fileno(), stdout.fileno())
            try:
                yield result
            finally:
                stdout.flush()
                os.dup2(result.fileno(), stdout.fileno())


def _find_verb(words: Sequence[str]) -> str:  # noqa: RET503  (`_end` does not return)
    """Ends the program if the first word is none: with help, the version, or the nearest verb."""
    first = words[0] if words else ""
    if first in VERBS:
        return first
    if not words:
        _end(USER_ERROR, _help(), sys.stderr)
    if first in ("-h", "--help"):
        _end(0, _help(), sys.stdout)
    if first == "--version":
        _end(0, f"areal {__version__}\n", sys.stdout)
    what, known = ("option", OPTIONS) if first.startswith("-") else ("verb", VERBS)
    near = did_you_mean(first, known) or "; areal --help lists them"
    _end(USER_ERROR, f"{USAGE}areal: no {what} {first}{near}\n", sys.stderr)


def _help() -> str:
    verbs = "".join(f"  {name:<12}{verb.summary}\n" for name, verb in VERBS.items())
    codes = "".join(f"  {code:<5}{what}\n" for code, what in CODES.items())
    return (
        f"{USAGE}\nTrain language-model agents with asynchronous reinforcement learning.\n\nverbs:\n{verbs}\n"
        f"areal VERB --help says more, with examples; areal --version tells the version.\n\nexit codes:\n{codes}"
    )


def _end(code: int, text: str, stream: TextIO) -> NoReturn:
    stream.write(text)
    raise SystemExit(code)


if __name__ == "__main__":
    sys.exit(main())
