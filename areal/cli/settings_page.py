"""The tables of docs/settings.md and docs/zh/settings.md, made from the settings' dataclasses:
`python -m areal.cli.settings_page FILE`.

It replaces what is below the mark in that file; a test compares the two. A page of another language has a file beside
it, `settings.yaml`, with each sentence of the dataclasses and its translation. A sentence that was changed has none any
more, so that no page says what is no longer true.
"""

import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from areal.api.errors import ConfigError
from areal.cli.reference import cell
from areal.config.experiment import DPOConfig, GRPOConfig, RewardConfig, SFTConfig
from areal.config.reference import Setting, as_yaml, settings

MARK = "<!-- Below this line: python -m areal.cli.settings_page FILE -->\n"
OTHERS: dict[type[Any], str] = {
    SFTConfig: "Supervised training",
    DPOConfig: "DPO",
    RewardConfig: "Reward models",
}
TRANSLATIONS = "settings.yaml"


@dataclass(frozen=True)
class Language:
    """What a page is written in; as it is made here, English."""

    sentences: dict[str, str] = field(default_factory=dict)
    """English -> this language, of what settings mean."""
    words: dict[str, str] = field(default_factory=dict)
    """The same of headings, types and units."""

    def sentence(self, english: str) -> str:
        return self.sentences[english] if self.sentences else english

    def word(self, english: str) -> str:
        return self.words[english] if self.words else english

    def kind(self, setting: Setting) -> str:
        """A type in words, such as `whole number or null, in steps`."""
        parts = re.split(r"(, | or )", setting.type)
        return "".join(self.words.get(part, part) for part in parts) + (
            f"{self.word(', in ')}{self.word(setting.unit)}" if setting.unit else ""
        )


def write(path: Path) -> None:
    above, mark, _ = path.read_text(encoding="utf-8").partition(MARK)
    path.write_text(f"{above}{mark}{tables(language_of(path))}", encoding="utf-8")


def language_of(page: Path) -> Language:
    """Of the translations beside it, which must be those of all sentences and of no others; without any, English."""
    file = page.with_name(TRANSLATIONS)
    if not file.exists():
        return Language()
    read = yaml.safe_load(file.read_text(encoding="utf-8"))
    sentences = {each["en"]: each["to"] for each in read["sentences"]}
    said = set(all_sentences())
    if wrong := sorted(said ^ sentences.keys()):
        what = "has no translation" if wrong[0] in said else "is said of no setting"
        raise ConfigError(
            f"{file} must have every sentence about a setting and no other, but {len(wrong)} differ, and this one "
            f"{what}: {wrong[0]!r}; change it there"
        )
    return Language(sentences, read["words"])


def all_sentences() -> list[str]:
    """What settings of any trainer mean, each once."""
    classes: tuple[type[Any], ...] = (GRPOConfig, *OTHERS)
    return list(dict.fromkeys(each.meaning for config_class in classes for each in settings(config_class)))


def tables(language: Language) -> str:
    """A table for each section of a run of episodes; then what other trainers have besides, or with another default."""
    known = settings(GRPOConfig)
    sections: dict[str, list[Setting]] = {}
    for each in known:
        sections.setdefault(each.name.rpartition(".")[0], []).append(each)
    parts = [
        _table(f"`{name}`" if name else language.word("The run"), rows, language) for name, rows in sections.items()
    ]
    usual = {each.name: each.default for each in known}
    for config_class, title in OTHERS.items():
        other = [each for each in settings(config_class) if usual.get(each.name, ...) != each.default]
        parts.append(_table(f"{language.word(title)}: `{config_class.__name__}`", other, language))
    return "".join(parts)


def _table(title: str, rows: list[Setting], language: Language) -> str:
    head = f"| {' | '.join(map(language.word, ('Setting', 'Default', 'Type')))} | |\n|---|---|---|---|\n"
    return f"\n## {title}\n\n{head}{''.join(_row(each, language) for each in rows)}"


def _row(setting: Setting, language: Language) -> str:
    cells = (
        f"`{setting.name}`",
        f"`{as_yaml(setting.default)}`",
        language.kind(setting),
        language.sentence(setting.meaning),
    )
    return f"| {' | '.join(map(cell, cells))} |\n"


if __name__ == "__main__":
    for page in sys.argv[1:]:
        write(Path(page))
