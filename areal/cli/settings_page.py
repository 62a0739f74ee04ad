"""The tables of docs/settings.md, made from the settings' dataclasses: `python -m areal.cli.settings_page FILE`.

It replaces what is below the mark in that file; a test compares the two.
"""

import sys
from pathlib import Path
from typing import Any

from areal.cli.reference import cell
from areal.config.experiment import DPOConfig, GRPOConfig, RewardConfig, SFTConfig
from areal.config.reference import Setting, as_yaml, settings

MARK = "<!-- Below this line: python -m areal.cli.settings_page docs/settings.md -->\n"
HEAD = "| Setting | Default | Type | |\n|---|---|---|---|\n"
OTHERS: dict[type[Any], str] = {
    SFTConfig: "Supervised training",
    DPOConfig: "DPO",
    RewardConfig: "Reward models",
}


def write(path: Path) -> None:
    above, mark, _ = path.read_text(encoding="utf-8").partition(MARK)
    path.write_text(f"{above}{mark}{tables()}", encoding="utf-8")


def tables() -> str:
    """A table for each section of a run of episodes; then what other trainers have besides, or with another default."""
    known = settings(GRPOConfig)
    sections: dict[str, list[Setting]] = {}
    for each in known:
        sections.setdefault(each.name.rpartition(".")[0], []).append(each)
    parts = [_table(f"`{name}`" if name else "The run", rows) for name, rows in sections.items()]
    usual = {each.name: each.default for each in known}
    for config_class, title in OTHERS.items():
        other = [each for each in settings(config_class) if usual.get(each.name, ...) != each.default]
        parts.append(_table(f"{title}: `{config_class.__name__}`", other))
    return "".join(parts)


def _table(title: str, rows: list[Setting]) -> str:
    return f"\n## {title}\n\n{HEAD}{''.join(map(_row, rows))}"


def _row(setting: Setting) -> str:
    kind = f"{setting.type}, in {setting.unit}" if setting.unit else setting.type
    cells = (f"`{setting.name}`", f"`{as_yaml(setting.default)}`", kind, setting.meaning)
    return f"| {' | '.join(map(cell, cells))} |\n"


if __name__ == "__main__":
    write(Path(sys.argv[1]))
