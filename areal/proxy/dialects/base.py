"""Server-sent events: the frames in which every dialect streams."""

# MERGED-DOC
# What every dialect holds to: a parameter is honoured, harmless, or refused by name; none is ignored in silence.
# Content that may show pictures. They come with the request: no file of this machine is read, nothing is fetched.
# Tools and the choice among them. However a client spells a tool, the template sees one spelling of it.

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

from areal.proxy.dialects import fields
from areal.proxy.errors import bad_request
from areal.proxy.types import Call
from areal.trajectory.message import Album, Content, Picture, content_of
from areal.utils.images import ImageError, read_base64, read_data_url
from areal.utils.logging import getLogger

DONE = b"data: [DONE]\n\n"

LINE_BREAKS = {"\x85".encode(): rb"\u0085", "\u2028".encode(): rb"\u2028", "\u2029".encode(): rb"\u2029"}
"""Legal inside JSON and no line breaks to the standard, but many clients split their lines there."""


def data(value: dict[str, Any]) -> bytes:
    """One line, to whoever reads it: JSON escapes the plain line breaks, and the rest are escaped here."""
    line = orjson.dumps(value)
    for character, escape in LINE_BREAKS.items():
        line = line.replace(character, escape)
    return b"data: " + line + b"\n\n"


def event(name: str, value: dict[str, Any]) -> bytes:
    return b"event: " + name.encode() + b"\n" + data(value)


HARMLESS = frozenset(
    ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention")
)
"""Bookkeeping of the hosted services; no answer depends on it."""


@dataclass(frozen=True)
class ParameterRules:
    max_choices: int = 128
    """Largest `n` of one request."""
    drop_params: bool = False
    """Go on without what cannot be honoured, with a line in the log the first time, instead of refusing."""
    album: Album | None = None
    """Where pictures are kept; None = the model sees none."""
    dropped: set[str] = field(default_factory=set)
    """What the log has named already."""

    def refuse(self, name: str, value: Any, rule: str) -> None:
        """Raises ApiError 400 naming the parameter; returns where it is to be dropped."""
        if not self.drop_params:
            raise bad_request(f"{name} {rule}, got {value!r:.200}; leave it out", name)
        if name not in self.dropped:
            self.dropped.add(name)
            getLogger("proxy").warning("%s %s; it is dropped because of proxy.drop_params", name, rule)

    def refuse_unsupported(
        self, body: dict[str, Any], honoured: Collection[str], meaningless: Mapping[str, tuple[Any, ...]]
    ) -> None:
        """`meaningless` are values by which parameters that are not honoured ask for nothing."""
        for name, value in body.items():
            if value is None or name in honoured or name in HARMLESS or value in meaningless.get(name, ()):
                continue
            self.refuse(name, value, "is not supported")


@dataclass(frozen=True)
class Parts:
    """How a dialect writes the parts of content."""

    texts: Mapping[str, str]
    """Types of texts, and the key under which each has it."""
    picture: str
    """The type of pictures."""
    read: Callable[[dict[str, Any], str], bytes]
    """The bytes of such a part, given where it stands. Raises ImageError or ApiError."""

    def content(self, value: Any, where: str, album: Album | None) -> Content:
        """Text, or a list of parts; without an album, of texts only. Raises ApiError 400 naming the part."""
        if isinstance(value, str):
            return value
        if not isinstance(value, list):
            raise bad_request(f"{where} must be text or a list of parts, got {value!r:.200}", where)
        return content_of([self.part(part, f"{where}[{place}]", album) for place, part in enumerate(value)])

    def part(self, part: Any, where: str, album: Album | None) -> str | Picture:
        if not isinstance(part, dict) or part.get("type") != self.picture:
            return fields.part(part, self.texts, where, "" if album is None else f" or {self.picture}")
        if album is None:
            text = next(iter(self.texts))
            raise bad_request(f"{where}.type must be {text}: this model sees no pictures, got {self.picture!r}", where)
        try:
            return album.picture(self.read(part, where))
        except ImageError as error:
            raise bad_request(f"{where}: {error}", where) from None


def chat_picture(part: dict[str, Any], where: str) -> bytes:
    """`detail` is a wish to hosted models: the model's own processor decides how it is shown."""
    return read_data_url(fields.text(fields.mapping(part, "image_url", where), "url", f"{where}.image_url.url"))


def responses_picture(part: dict[str, Any], where: str) -> bytes:
    if part.get("file_id") is not None:
        raise bad_request(f"{where}.file_id is not supported; send image_url with a data URL", where)
    return read_data_url(fields.text(part, "image_url", f"{where}.image_url"))


def messages_picture(block: dict[str, Any], where: str) -> bytes:
    source = fields.mapping(block, "source", f"{where}.source")
    if source.get("type") != "base64":
        raise bad_request(
            f"{where}.source.type must be base64: nothing is downloaded here, got {source.get('type')!r}", where
        )
    return read_base64(fields.text(source, "data", f"{where}.source.data"))


Tool = dict[str, Any]


def function_tool(wire: dict[str, Any], schema_key: str, where: str) -> Tool:
    """As Chat Completions nests it; `wire` has the function's fields, its schema under `schema_key`."""
    function: dict[str, Any] = {"name": fields.text(wire, "name", f"{where}.name")}
    if wire.get("description") is not None:
        function["description"] = fields.text(wire, "description", f"{where}.description")
    if wire.get(schema_key) is not None:
        function["parameters"] = fields.mapping(wire, schema_key, f"{where}.{schema_key}")
    if wire.get("strict") is not None:
        function["strict"] = fields.boolean(wire, "strict", False)
    return {"type": "function", "function": function}


def choose(call: Call, kind: str, name: str | None = None) -> None:
    """Write a choice of kind auto, none, required or named into the call."""
    if kind == "none":
        call.tools = None
    elif kind in ("required", "named"):
        names = [tool["function"]["name"] for tool in call.tools or ()]
        if not names:
            raise bad_request("tool_choice asks for a tool call, but there are no tools; add some", "tool_choice")
        if kind == "named" and name not in names:
            raise bad_request(
                f"tool_choice must name one of the tools, {', '.join(names)}, got {name!r}", "tool_choice"
            )
        call.tool_choice, call.forced_tool = "required", name
