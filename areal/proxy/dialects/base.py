"""What dialects share: the protocol they follow, rules about parameters, content with images, tools, and events.

Every dialect holds to one rule: a parameter is honoured, harmless, or refused by name; none is ignored in silence.
Images come with the request: no file of this machine is read and nothing is downloaded.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import orjson

from areal.proxy.dialects import fields
from areal.proxy.errors import ApiError, bad_request
from areal.proxy.types import Call, EventWriter, Reply
from areal.trajectory.message import Content, Image, ImageCache, Message, content_of
from areal.utils.images import ImageError
from areal.utils.logging import getLogger
from areal.utils.shorten import printable, shortened, shown

HARMLESS = frozenset(
    ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention")
)
"""Bookkeeping of the hosted services; no answer depends on it."""

MAX_DROPPED_NAMES = 100
"""At most this many dropped parameters are logged, so that made-up names cannot flood the log."""
MAX_TOKENS = 2**31
"""The largest number of tokens that a request may ask for; the model's context is the real limit."""

Images = ImageCache | None
"""Where the images of a request are kept; None = the model takes no images."""


class Dialect(Protocol):
    """What each module of this package in `DIALECTS` has."""

    GROWING: str
    """The list in a request whose items each become a message, whatever the others are; empty = there is none."""

    def parse(self, body: dict[str, Any], rules: "ParameterRules", past: Sequence[Message] = ()) -> Call:
        """Read a request, of whose `GROWING` list the first items were read before, as `past`, and are not there.

        Raises ApiError 400 naming the parameter.
        """
        ...

    def render(self, call: Call, reply: Reply) -> dict[str, Any]:
        """Write a whole answer."""
        ...

    def writer(self, call: Call) -> EventWriter:
        """Write a streamed answer."""
        ...

    def error(self, failure: ApiError) -> dict[str, Any]:
        """Write the body of a failure."""
        ...


@dataclass(frozen=True)
class ParameterRules:
    """What the proxy's settings allow a request to ask for."""

    max_choices: int = 128
    """Largest `n` of one request."""
    drop_params: bool = False
    """Go on without what cannot be honoured, with a line in the log the first time, instead of refusing."""
    images: Images = None
    trained: bool = True
    """Answers may be trained, so nothing may change the distribution that they are drawn from."""
    thinks: bool = False
    """The model marks its thinking."""
    thinking_switch: bool = False
    """A call may choose whether it thinks."""
    dropped: set[str] = field(default_factory=set)
    """What the log has named already."""

    def refuse_or_drop(self, name: str, value: Any, rule: str) -> None:
        """Raises ApiError 400 naming the parameter, or returns if the parameter is to be dropped."""
        name = printable(shortened(name, 50))  # it may be the client's own word
        if not self.drop_params:
            raise bad_request(f"{name} {rule}, got {shown(value, 100)}; leave it out", name)
        if name not in self.dropped and len(self.dropped) < MAX_DROPPED_NAMES:
            self.dropped.add(name)
            getLogger("proxy").warning("%s %s; it is dropped because of proxy.drop_params", name, rule)

    def refuse_unsupported(
        self, body: dict[str, Any], honoured: Collection[str], meaningless: Mapping[str, tuple[Any, ...]]
    ) -> None:
        """`meaningless` are values by which parameters that are not honoured ask for nothing."""
        for name, value in body.items():
            if value is None or name in honoured or name in HARMLESS or value in meaningless.get(name, ()):
                continue
            self.refuse_or_drop(name, value, "is not supported")


@dataclass(frozen=True)
class ContentParts:
    """How a dialect writes content that is a list of parts."""

    texts: Mapping[str, str]
    """Types of text parts, and the key of each one's text."""
    image: str = ""
    """The type of image parts; empty = there are none."""
    read_image: Callable[[dict[str, Any], str], bytes] | None = None
    """The bytes of an image part, given its path in the request. Raises ImageError or ApiError."""

    def text(self, value: Any, where: str) -> str:
        """Content without images. Raises ApiError 400 naming the part."""
        if isinstance(value, str):
            return value
        return "".join(self._text_of(part, place) for part, place in _listed(value, where))

    def content(self, value: Any, where: str, images: Images) -> Content:
        """Content with images, if the model takes any. Raises ApiError 400 naming the part."""
        if isinstance(value, str):
            return value
        return content_of([self.part(part, place, images) for part, place in _listed(value, where)])

    def part(self, part: Any, where: str, images: Images) -> str | Image:
        if self.read_image is None or not isinstance(part, dict) or part.get("type") != self.image:
            return self._text_of(part, where, "" if images is None else f" or {self.image}")
        if images is None:
            text = next(iter(self.texts))
            raise bad_request(
                f"{where}.type must be {text}: this model takes no images, got {shown(self.image)}", where
            )
        try:
            return images.get(self.read_image(part, where))
        except ImageError as error:
            raise bad_request(f"{where}: {error}", where) from None

    def _text_of(self, part: Any, where: str, or_else: str = "") -> str:
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(kind, str) or kind not in self.texts:
            raise bad_request(f"{where}.type must be {next(iter(self.texts))}{or_else}, got {shown(kind)}", where)
        return fields.text(part, self.texts[kind], where)


def _listed(value: Any, where: str) -> Iterator[tuple[Any, str]]:
    """The parts, each with its path."""
    if not isinstance(value, list):
        raise bad_request(f"{where} must be text or a list of parts, got {shown(value)}", where)
    return ((part, f"{where}[{place}]") for place, part in enumerate(value))


Tool = dict[str, Any]
"""As Chat Completions nests it, however the client spells it: the spelling that chat templates know."""


def function_tool(wire: dict[str, Any], schema_key: str, where: str) -> Tool:
    """`wire` has the function's fields, with its schema under `schema_key`."""
    function: dict[str, Any] = {"name": fields.text(wire, "name", f"{where}.name")}
    if wire.get("description") is not None:
        function["description"] = fields.text(wire, "description", f"{where}.description")
    if wire.get(schema_key) is not None:
        function["parameters"] = fields.mapping(wire, schema_key, f"{where}.{schema_key}")
    if wire.get("strict") is not None:
        function["strict"] = fields.boolean(wire, "strict", False)
    return {"type": "function", "function": function}


def choose_tool(call: Call, kind: str, name: str | None = None) -> None:
    """Write a choice of kind auto, none, required or named into the call."""
    if kind == "none":
        call.tools = None
    elif kind in ("required", "named"):
        names = [tool["function"]["name"] for tool in call.tools or ()]
        if not names:
            raise bad_request("tool_choice asks for a tool call, but there are no tools; add some", "tool_choice")
        if kind == "named" and name not in names:
            raise bad_request(
                f"tool_choice must name one of the tools, {shortened(', '.join(names), 100)}, got {shown(name, 100)}",
                "tool_choice",
            )
        call.tool_choice, call.forced_tool = "required", name


def openai_format(wanted: dict[str, Any], where: str, nested: str | None = None) -> dict[str, Any] | None:
    """The response format as `Call` has it; `nested` is the key under which one of the dialects holds the schema."""
    kind = wanted.get("type", "text")
    if kind == "json_schema":
        path = where if nested is None else f"{where}.{nested}"
        described = wanted if nested is None else fields.mapping(wanted, nested, path)
        schema = fields.mapping(described, "schema", f"{path}.schema")
        return {"type": "json_schema", "schema": schema, "strict": fields.boolean(described, "strict", False)}
    if kind not in ("text", "json_object"):
        raise bad_request(f"{where}.type must be text, json_object or json_schema, got {shown(kind)}", where)
    return {"type": "json_object"} if kind == "json_object" else None


def openai_error(failure: ApiError) -> dict[str, Any]:
    body = {"message": failure.message, "type": failure.kind, "param": failure.param, "code": failure.code}
    return {"error": body}


SSE_DONE = b"data: [DONE]\n\n"

_LINE_BREAKS = {"\x85".encode(): rb"\u0085", "\u2028".encode(): rb"\u2028", "\u2029".encode(): rb"\u2029"}
"""Legal inside JSON and no line breaks to the standard, but many clients split their lines there."""


def sse_data(value: dict[str, Any]) -> bytes:
    """A server-sent event on one line for every client: JSON escapes plain line breaks, the others are escaped here."""
    line = orjson.dumps(value)
    for character, escape in _LINE_BREAKS.items():
        line = line.replace(character, escape)
    return b"data: " + line + b"\n\n"


def sse_event(name: str, value: dict[str, Any]) -> bytes:
    return b"event: " + name.encode() + b"\n" + sse_data(value)
