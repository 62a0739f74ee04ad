from pathlib import Path

from areal.cli.reference import MARK, reference

PAGE = Path(__file__).parents[2] / "docs/command-line.md"


def test_reference_page_is_what_the_verbs_declare() -> None:
    assert PAGE.read_text(encoding="utf-8").partition(MARK)[2] == reference(), (
        "make it again: python -m areal.cli.reference docs/command-line.md"
    )
