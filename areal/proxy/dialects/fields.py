"""Reading one field of a JSON body: right kind, right range, or a 400 that names it. `None` counts as absent."""

from typing import Any

from areal.proxy.errors import bad_request


def boolean(body: dict[str, Any], name: str, default: bool) -> bool:
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise bad_request(f"{name} must be true or false, got {value!r}", name)
    return value


def integer(body: dict[str, Any], name: str, low: int, high: int) -> int | None:
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise bad_request(f"{name} must be an integer in [{low}, {high}], got {value!r}", name)
    return value


def number(body: dict[str, Any], name: str, low: float, high: float) -> float | None:
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise bad_request(f"{name} must be a number in [{low:g}, {high:g}], got {value!r}", name)
    return float(value)


def text(body: dict[str, Any], name: str, where: str) -> str:
    value = body.get(name)
    if not isinstance(value, str):
        raise bad_request(f"{where} must be text, got {value!r}", where)
    return value


def objects(body: dict[str, Any], name: str, where: str) -> list[dict[str, Any]]:
    value = body.get(name)
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise bad_request(f"{where} must be a list of objects, got {value!r:.200}", where)
    return value
