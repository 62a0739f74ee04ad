"""`areal config [WORD …]`: every setting with its default, type, unit and meaning, or a JSON schema for editors."""

import argparse
import difflib
import json
import re
import shutil
import textwrap
from collections.abc import Sequence
from dataclasses import asdict

from areal.api.errors import ConfigError
from areal.config.experiment import GRPOConfig, SFTConfig
from areal.config.reference import Setting, as_yaml, json_schema, settings

WIDEST, NARROWEST = 100, 40
INDENT = "    "


def run(args: argparse.Namespace) -> int:
    config_class = SFTConfig if args.sft else GRPOConfig
    if args.json_schema:
        if args.word:
            raise ConfigError(f"--json-schema is of all settings, got {' '.join(args.word)!r} too; leave it out")
        print(json.dumps(json_schema(config_class), indent=2))
        return 0
    chosen = choose(settings(config_class), args.word)
    if args.json:
        print(json.dumps({"settings": [asdict(each) for each in chosen]}, indent=2), file=args.stdout)
    else:
        width = min(WIDEST, max(NARROWEST, shutil.get_terminal_size().columns))
        print("\n".join(lines_of(each, width) for each in chosen))
    return 0


def choose(known: Sequence[Setting], words: Sequence[str]) -> list[Setting]:
    """Those in whose name or meaning all words occur. Raises ConfigError if there are none."""
    chosen = [each for each in known if all(word.lower() in f"{each.name} {each.meaning}".lower() for word in words)]
    if not chosen:
        parts = dict.fromkeys(part for each in known for part in (each.name, *re.split(r"[._]", each.name)))
        near = difflib.get_close_matches(" ".join(words), list(parts), n=1)
        raise ConfigError(
            f"no setting has {' and '.join(map(repr, words))} in its name or meaning; "
            + (f"did you mean {near[0]}?" if near else "areal config lists all of them")
        )
    return chosen


def lines_of(setting: Setting, width: int) -> str:
    kind = f"{setting.type}, in {setting.unit}" if setting.unit else setting.type
    head = f"{setting.name}={as_yaml(setting.default)}"
    beside = f"{head}  ({kind})"
    shown = [beside] if len(beside) <= width else [head, *_indented(f"({kind})", width)]
    return "\n".join([*shown, *_indented(setting.meaning, width)])


def _indented(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width, initial_indent=INDENT, subsequent_indent=INDENT, break_on_hyphens=False)
