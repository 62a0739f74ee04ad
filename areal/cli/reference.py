"""The reference part of docs/command-line.md, made from the declared verbs: `python -m areal.cli.reference FILE`.

It replaces what is below the mark in that file; a test compares the two.
"""

import argparse
import sys
from pathlib import Path

from areal.cli.parsers import CODES, Verb, verb_parser
from areal.cli.verbs import VERBS

MARK = "<!-- Below this line: python -m areal.cli.reference docs/command-line.md -->\n"


def write(path: Path) -> None:
    above, mark, _ = path.read_text(encoding="utf-8").partition(MARK)
    path.write_text(f"{above}{mark}{reference()}", encoding="utf-8")


def reference() -> str:
    codes = "".join(f"| {code} | {cell(what)} |\n" for code, what in CODES.items())
    verbs = "".join(_section(name, verb) for name, verb in VERBS.items())
    return f"\n## Exit codes\n\n| Code | |\n|---|---|\n{codes}\n## Verbs\n{verbs}"


def _section(name: str, verb: Verb) -> str:
    actions = [each for each in verb_parser(name, verb)._actions if "--help" not in each.option_strings]
    rows = "".join(f"| `{_words(each)}` | {cell(each.help or '')} |\n" for each in actions)
    examples = "\n".join(f"# {what}\n{command}\n" for command, what in verb.examples.items())
    codes = ", ".join(f"{code} = {what}" for code, what in verb.codes.items())
    ending = f"\nExit codes: {codes}.\n" if codes else ""
    what = f"{verb.summary[0].upper()}{verb.summary[1:]}."
    return f"\n### areal {name}\n\n{what}\n\n| | |\n|---|---|\n{rows}\n```sh\n{examples}```\n{ending}"


def _words(action: argparse.Action) -> str:
    """`--port PORT`, `--engine {builtin,fake}`, `[KEY=VALUE ...]`"""
    if action.choices is not None:
        value = "{" + ",".join(map(str, action.choices)) + "}"
    else:
        value = str(action.metavar or action.dest.upper())
    if not action.option_strings:
        return {"*": f"[{value} ...]", "?": f"[{value}]"}.get(str(action.nargs), value)
    if action.nargs == "?":
        value = f"[{value}]"
    many = " ..." if action.nargs == "+" else ""
    return ", ".join(action.option_strings) + ("" if action.nargs == 0 else f" {value}{many}")


def cell(text: str) -> str:
    """Of a table in Markdown."""
    return text.replace("|", r"\|")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
