"""Reading one field of a JSON body: the right kind and range, or a 400 that names it. `None` counts as absent."""

from typing import Any

from areal.proxy.errors import bad_request
from areal.utils.shorten import shown


def boolean(body: dict[str, Any], name: str, default: bool) -> bool:
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise bad_request(f"{name} must be true or false, got {shown(value)}", name)
    return value


def integer(body: dict[str, Any], name: str, low: int, high: int) -> int | None:
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise bad_request(f"{name} must be an integer in [{low}, {high}], got {shown(value)}", name)
    return value


def number(body: dict[str, Any], name: str, low: float, high: float) -> float | None:
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise bad_request(f"{name} must be a number in [{low:g}, {high:g}], got {shown(value)}", name)
    return float(value)


def top_p(body: dict[str, Any]) -> float | None:
    value = number(body, "top_p", 0, 1)
    if value == 0:
        raise bad_request("top_p must be above 0, got 0; use temperature 0 for the likeliest token", "top_p")
    return value


def text(body: dict[str, Any], name: str, where: str) -> str:
    """A text that must be there; `where` is its full path for the error."""
    value = body.get(name)
    if not isinstance(value, str):
        raise bad_request(f"{where} must be text, got {shown(value)}", where)
    return value


def optional_text(body: dict[str, Any], name: str) -> str | None:
    return None if body.get(name) is None else text(body, name, name)


def texts(body: dict[str, Any], name: str) -> list[str] | None:
    """Texts none of which is empty; one alone need not be in a list."""
    value = body.get(name)
    if value is None:
        return None
    listed = [value] if isinstance(value, str) else value
    if not isinstance(listed, list) or not all(isinstance(item, str) and item for item in listed):
        raise bad_request(f"{name} must be a text or a list of texts, none of them empty, got {shown(value)}", name)
    return listed


def mapping(body: dict[str, Any], name: str, where: str) -> dict[str, Any]:
    value = body.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise bad_request(f"{where} must be an object, got {shown(value)}", where)
    return value


def objects(body: dict[str, Any], name: str, where: str) -> list[dict[str, Any]]:
    value = body.get(name)
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise bad_request(f"{where} must be a list of objects, got {shown(value)}", where)
    return value
