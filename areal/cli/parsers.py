"""What every verb's words have in common: how they are declared, parsed, refused and shown in help.

An unknown option or verb is refused with the nearest known one. Nothing here is heavy to load.
"""

import argparse
import difflib
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

CODES = {
    0: "it worked, or the answer is yes",
    1: "the answer is no (check, doctor, replay), or a bug: then with a traceback",
    2: "a word, a setting or a file is wrong; one line says what to do",
    3: "status: the run is finished",
    4: "status: the run was stopped, failed or killed, and can go on",
    5: "status: the run's driver gives no answer",
    130: "Ctrl-C",
    141: "who read the output has gone (| head)",
    143: "SIGTERM; a run has saved everything",
}
"""How every verb ends."""
USER_ERROR = 2
INTERRUPTED = 130
OUTPUT_CLOSED = 141
EXAMPLES = "examples:\n"


@dataclass(frozen=True)
class Verb:
    summary: str
    """A sentence without its full stop."""
    declare: Callable[[argparse.ArgumentParser], None]
    """Adds the verb's arguments to its parser."""
    examples: Mapping[str, str]
    """Command -> what it does."""
    codes: Mapping[int, str] = field(default_factory=dict)
    """What exit codes mean here in particular."""
    imports_user_code: bool = False


def verb_parser(name: str, verb: Verb) -> "VerbParser":
    parser = VerbParser(
        prog=f"areal {name}",
        description=f"{verb.summary[0].upper()}{verb.summary[1:]}.",
        epilog=_epilog(verb),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,  # an abbreviation in a script would break with the next option
    )
    verb.declare(parser)
    return parser


def _epilog(verb: Verb) -> str:
    shown = EXAMPLES + "\n".join(f"  # {what}\n  {command}\n" for command, what in verb.examples.items())
    if verb.codes:
        shown += "\nexit codes:\n" + "".join(f"  {code}  {what}\n" for code, what in verb.codes.items())
    return shown


class VerbParser(argparse.ArgumentParser):
    """argparse's, except that a mistyped option is named first, with the nearest one, and not what else is missing."""

    def parse_words(self, words: Sequence[str]) -> argparse.Namespace:
        """Ends the program with code 2 if they are wrong."""
        known = self.option_names()
        for word in words:
            if word == "--":
                break
            name = word.partition("=")[0]
            if name.startswith("--") and " " not in name and name not in known:
                self.error(f"no option {name}{did_you_mean(name, known)}")
        return self.parse_intermixed_args(list(words))

    def option_names(self) -> list[str]:
        return [name for action in self._actions for name in action.option_strings]

    def error(self, message: str) -> NoReturn:
        """In the form of all other errors, after the usage."""
        self.print_usage(sys.stderr)
        self.exit(USER_ERROR, f"{self.prog}: {message}\n")


def port(text: str) -> int:
    """For `type=`."""
    if not text.isascii() or not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"must lie in [0, 65535], got {text}; use 0 for a free one")
    return int(text)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`; did you mean --config?`, or nothing if no known word is near."""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"; did you mean {near[0]}?" if near else ""
