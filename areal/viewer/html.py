"""HTML as values: `el("p", text)` escapes its text. Only what is built here is HTML; all that runs hold is text.

Text of models may try anything: markup, terminal escapes, characters that turn the direction of what follows. Markup is
escaped, and characters that act instead of being seen are replaced by ones that are seen.
"""

from collections.abc import Iterable
from typing import Any

import orjson


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


Child = Markup | str | int | float | None | Iterable["Child"]
Attribute = str | int | float | bool | None

VOID = frozenset({"br", "input", "link", "meta"})
"""Elements of HTML without an end."""

_DIRECTIONS = {
    0x061C: "ALM", 0x200E: "LRM", 0x200F: "RLM", 0x202A: "LRE", 0x202B: "RLE", 0x202C: "PDF", 0x202D: "LRO",
    0x202E: "RLO", 0x2066: "LRI", 0x2067: "RLI", 0x2068: "FSI", 0x2069: "PDI",
}  # fmt: skip
_SEEN: dict[int, str] = {
    **{code: chr(0x2400 + code) for code in range(32) if chr(code) not in "\n\t"},
    0x7F: "␡",
    **dict.fromkeys(range(0x80, 0xA0), "�"),
    **dict.fromkeys(range(0xD800, 0xE000), "�"),
    0x2028: "␤",
    0x2029: "␤",
    **{code: f"⟨{name}⟩" for code, name in _DIRECTIONS.items()},
}
_ESCAPED = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#39;"})


def visible(text: str) -> str:
    """The text with characters that would act, and not be seen, as ones that are seen."""
    return text if text.isprintable() else text.translate(_SEEN)


def escape(text: str) -> Markup:
    return Markup(visible(text).translate(_ESCAPED))


def el(name: str, /, *children: Child, **attributes: Attribute) -> Markup:
    """An element. `class_` stands for `class`, `aria_label` for `aria-label`; None and False are left out."""
    said = "".join(_attribute(key, value) for key, value in attributes.items())
    if name in VOID:
        return Markup(f"<{name}{said}>")
    return Markup(f"<{name}{said}>{join(children)}</{name}>")


def join(children: Iterable[Child], between: str = "") -> Markup:
    return Markup(between.join(_child(each) for each in children))


def data_block(name: str, value: Any) -> Markup:
    """Data for a script of the page, which finds it under that id. It is never run."""
    text = orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS).decode()
    return Markup(f'<script type="application/json" id="{name}">{text.replace("<", chr(92) + "u003c")}</script>')


def _child(child: Child) -> str:
    if isinstance(child, Markup):
        return child
    if isinstance(child, str):
        return escape(child)
    if child is None:
        return ""
    return str(child) if isinstance(child, int | float) else join(child)


def _attribute(key: str, value: Attribute) -> str:
    if value is None or value is False:
        return ""
    name = key.rstrip("_").replace("_", "-")
    return f" {name}" if value is True else f' {name}="{escape(str(value))}"'
