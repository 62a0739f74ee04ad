"""Values in messages: enough of them to be recognised, never all of something long; only characters that print;
durations and counts as people say them."""

from typing import Any

SHOWN_CHARACTERS = 200


def shown(value: Any, most: int = SHOWN_CHARACTERS) -> str:
    """The value as Python writes it, cut after `most` characters. Works for values that cannot be written, too."""
    if isinstance(value, str):
        value = value[:most]  # one character too few at worst, because of the quotes, and no megabytes to escape
    try:
        text = repr(value)
    except Exception:  # the value may be anything: an integer of too many digits, an object whose repr raises
        return f"<{type(value).__name__}>"
    return shortened(text, most)


def first_line(error: BaseException) -> str:
    """What an error says, without the lines that some libraries add; empty if it says nothing."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "")


def shortened(text: str, most: int = SHOWN_CHARACTERS) -> str:
    return text if len(text) <= most else text[:most] + "…"


def printable(text: str) -> str:
    """Control characters, and those that turn the direction of what follows, become a mark: what a model or an agent
    said cannot move a terminal's cursor. Lines and tabs stay."""
    return text if text.isprintable() else "".join(c if c.isprintable() or c in "\n\t" else "�" for c in text)


def duration(seconds: float) -> str:
    """`8 s`, `3 min 20 s`, `2 h 5 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def plural(count: int, noun: str) -> str:
    """`1 episode`, `1,024 episodes`."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"
