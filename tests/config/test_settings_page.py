"""The pages of settings are what the dataclasses declare, in each language that there is one in."""

import re
import shutil
from pathlib import Path

import pytest

from areal.api.errors import ConfigError
from areal.cli.settings_page import MARK, TRANSLATIONS, language_of, tables, write
from areal.config.reference import UNITS

DOCS = Path(__file__).parents[2] / "docs"
CHINESE = DOCS / "zh/settings.md"
PAGES = [DOCS / "settings.md", CHINESE]
NAME = re.compile(r"`[^`]+`|\b[a-z]{2,}(?:[._][a-z_]+)+\b|\b[A-Z_]{4,}\b|\b\d+(?:\.\d+)*(?:e-\d+)?\b")


@pytest.mark.parametrize("page", PAGES, ids=["english", "chinese"])
def test_settings_page_is_what_the_dataclasses_declare(page: Path) -> None:
    assert page.read_text(encoding="utf-8").partition(MARK)[2] == tables(language_of(page)), (
        "make it again: python -m areal.cli.settings_page docs/settings.md docs/zh/settings.md"
    )


def test_translated_sentence_has_the_names_and_numbers_of_the_original() -> None:
    lost = {
        name: english
        for english, chinese in language_of(CHINESE).sentences.items()
        for name in NAME.findall(english)
        if name not in chinese
    }
    assert lost == {}


def test_every_word_of_a_table_is_translated() -> None:
    words = language_of(CHINESE).words
    assert set(UNITS.values()) <= words.keys()
    table = CHINESE.read_text(encoding="utf-8").partition(MARK)[2]
    for english in ("whole number", "list of", ", in ", " or ", "The run", "Supervised"):
        assert english not in table


def test_sentence_that_changes_is_missed_and_so_is_one_that_is_gone(tmp_path: Path) -> None:
    for file in (CHINESE, CHINESE.with_name(TRANSLATIONS)):
        shutil.copy(file, tmp_path)
    page, translations = tmp_path / CHINESE.name, tmp_path / TRANSLATIONS
    before = page.read_text(encoding="utf-8")
    write(page)
    assert page.read_text(encoding="utf-8") == before
    text = translations.read_text(encoding="utf-8")
    translations.write_text(text.replace("Passes over train_dataset.", "Passes over the tasks."), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"2 differ, and this one is said of no setting: 'Passes over the tasks\.'"):
        write(page)
    translations.write_text(re.sub(r"  - en: 'Passes over train_dataset\.'\n.*\n", "", text), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"1 differ, and this one has no translation: 'Passes over train_dataset\.'"):
        write(page)
    assert page.read_text(encoding="utf-8") == before
