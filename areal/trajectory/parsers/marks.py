"""Fixed texts that stand at a place of an answer that may not be finished yet."""

import re

_SPACE = re.compile(r"\s*")


def after_space(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    assert found is not None
    return found.end()


def after_mark(text: str, at: int, mark: str) -> int | None:
    """Behind a mark that stands at `at`, white space before it allowed; None if the text ends too early to say."""
    at = after_space(text, at)
    if text.startswith(mark, at):
        return at + len(mark)
    if mark.startswith(text[at:]):
        return None
    raise ValueError(f"{mark} is missing")


def partial_suffix(text: str, mark: str) -> int:
    """The length of the longest end of `text` that is a proper beginning of `mark`."""
    return next((n for n in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:n])), 0)
