from pathlib import Path

from areal.cli.settings_page import MARK, tables

PAGE = Path(__file__).parents[2] / "docs/settings.md"


def test_settings_page_is_what_the_dataclasses_declare() -> None:
    assert PAGE.read_text(encoding="utf-8").partition(MARK)[2] == tables(), (
        "make it again: python -m areal.cli.settings_page docs/settings.md"
    )
