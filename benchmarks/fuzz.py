"""Requests that no client should send, by the thousand: `python -m benchmarks.fuzz --count 100000 --seed 1`.

Each starts from a request recorded from a real client (tests/proxy/clients) and is changed at random: values of another
kind, missing and doubled fields, deep nesting, numbers beyond every range, broken text, fields of another dialect, raw
bytes, odd headers and paths. They are answered in process, on the fake engine, by proxies of several model families.

A request fails the run if its status is 500 or above, if it takes longer than its deadline, or if its error repeats
more than 200 characters of it. The smallest failing one is printed with what reproduces it. Fields that take no part in
a failure are removed first.
"""

import argparse
import asyncio
import json
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from areal.config.rollout import GenerationHyperparameters
from areal.engine.builtin.tokenizer import make_tokenizer
from areal.engine.inference.fake import FakeEngine
from areal.proxy import Proxy, Session
from areal.proxy.dialects import DIALECTS
from areal.proxy.dialects.base import ParameterRules
from areal.proxy.errors import ApiError
from areal.trajectory.message import ImageCache

RECORDED = Path(__file__).parents[1] / "tests" / "proxy" / "clients"
DEADLINE_SECONDS = 10.0
ECHO_CHARACTERS = 200
"""What an error may repeat of its request."""
MARK = "⌘"
"""Long texts are made of this character, which nothing else contains: so what was repeated can be counted."""
SESSION_REQUESTS = 100
"""After so many requests a session is replaced, because conversations grow."""
SHRINKING_ATTEMPTS = 400
POSITIONS = 4096
NO_ANSWER = 0
"""Counted as a status."""

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
TAGGED_CALL = "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"
FAMILIES: dict[str, tuple[str | None, str]] = {
    "hermes": ("1259", CALL),
    "qwen3_coder": (None, TAGGED_CALL),
    "llama3": (None, '{"name": "add", "parameters": {"a": 1}}'),
    "mistral": ("[THINK]well[/THINK]1259", '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}]'),
}
"""Tool parser -> what its engine answers, in turn; None = what the request's grammar allows."""

SERVED = "mistral"
"""The family whose answers are not trained, so that its clients may steer them."""

RAW = {"\ue000NaN": b"NaN", "\ue000inf": b"-Infinity", "\ue000big": b"1e999", "\ue000int": b"9" * 400}
"""Texts that stand for what `json.dumps` would not write."""
TEXTS = [
    "", " ", "\x00", "\ud800", "\udfff\ud800", "ﷺ\u2028", "\ue000NaN", "\ue000inf", "\ue000big", "\ue000int",
    MARK * 300, MARK * 5000, "auto", "none", "required", "any", "tool", "function", "add", "get_weather", "user",
    "assistant", "system", "tool_result", "tool_use", "thinking", "image", "image_url", "input_image", "input_text",
    "reasoning", "function_call", "function_call_output", "message", "json_schema", "json_object", "base64", "null",
    "object", "string", "number", "integer", "#", "#/$defs/a", "#/properties/a", "(", "[a-z]{1,9}", "(a+)+$", "date",
    "<|im_end|>", "<|endoftext|>", "<think>", "</think>", CALL, TAGGED_CALL, "<tool_call>", "[TOOL_CALLS][",
    '<tool_call>\n{"name": "\\ud800", "arguments": {"a": "\\ud800"}}\n</tool_call>', "data:image/png;base64,",
    "data:image/png;base64,iVBORw0KGgo=", "data:image/gif;base64,R0lGODlhAQABAIAAAP///wAAACwAAAAAAQABAAACAkQBADs=",
    "data:,x", "file:///etc/passwd", "http://[::1", "message.output_text.logprobs", '{"a": NaN, "b": 1e999}',
    '{"a": "\\ud800"}', "[" * 2000, "{'a': {1, 2}}", "[{'id': 'x', 'function': {'name': 'f', 'arguments': {1: {2}}}}]",
    "[{'id': 'x', 'function': {'name': '\\ud800', 'arguments': {'a': b'x', 2: 3}}}]", "9" * 5000, "-1", "1e400",
]  # fmt: skip
NUMBERS: list[Any] = [
    0, 1, -1, 2, 0.5, 1e-46, 1e-38, 5e-324, 1e38, 3.5e38, 1e308, -1e308, 2**31, 2**31 - 1, -(2**31), 2**53 + 1,
    2**63 - 1, 2**63, -(2**63), 2**64 - 1, 1.0, -0.0, 2.0,
]  # fmt: skip
EMPTY: list[Any] = [None, True, False, [], {}, [[]], [{}], {"": ""}, [None], [1], ["a"], [["a"]], {"a": 1}]
SCHEMAS: list[Any] = [
    {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    {"type": "object", "properties": {"a": {"type": ["string", "null"]}}, "required": [["a"]]},
    {"properties": {"a": {"$ref": "#/$defs/x"}}, "$defs": {"x": {"enum": ["b", "c", 1, None]}}},
    {"$defs": {"x": {"$ref": "#/$defs/x"}}, "$ref": "#/$defs/x"},
    {"type": "array", "items": {"type": "number", "minimum": 1e308, "maximum": -1e308}, "minItems": 10**9},
    {"anyOf": [{"type": "string", "pattern": "(", "maxLength": -1}, {"const": {"a": [1]}}]},
    {"type": "string", "pattern": "(a{1,100}){1,100}", "format": MARK * 400},
    {"allOf": [{"properties": {"a": {}}}, {"required": ["b"]}], "additionalProperties": False},
    {"type": "object", "properties": 1, "required": 1, "enum": 1, "$ref": 1, "anyOf": 1, "type ": 1},
    {"type": 5, "properties": []},
    {"type": "object", "properties": {"a": 1, MARK * 400: {"type": [["x"]], "anyOf": 3}}},
]
"""Plausible, contradictory and broken."""
WORDS = (
    "model messages input instructions previous_response_id tools tool_choice parallel_tool_calls response_format text "
    "n max_tokens max_completion_tokens max_output_tokens temperature top_p top_k stop stop_sequences seed logprobs "
    "top_logprobs stream stream_options include system output_config thinking metadata user store reasoning background "
    "truncation frequency_penalty presence_penalty logit_bias modalities mcp_servers service_tier reward role content "
    "type name id call_id tool_call_id tool_use_id tool_calls function function_call arguments output summary source "
    "data image_url url file_id detail strict schema format json_schema parameters input_schema description required "
    "properties additionalProperties items enum const anyOf oneOf allOf $ref $defs pattern minimum maximum minLength "
    "include_usage disable_parallel_tool_use reasoning_content refusal cache_control prompt echo suffix best_of "
    "functions reasoning_effort effort budget_tokens allowed_tools mode custom custom_tool_call custom_tool_call_output"
)
FIELDS = WORDS.split()
"""Of all dialects, and of JSON schemas."""
HEADERS: list[tuple[str, list[bytes]]] = [
    ("x-stainless-retry-count", [b"0", b"1", b"-1", b"9" * 5000, "²".encode(), b"1e3", b""]),
    ("idempotency-key", [b"k", b"k" * 4000, b"\xff\xfe", b"", "⌘".encode() * 500]),
    ("authorization", [b"", b"Bearer", b"Bearer \xff", b"Basic x", b"Bearer " + b"x" * 9000, b"bearer  x"]),
    ("x-api-key", [b"\xff", b"\x00", b"areal-no-session"]),
    ("content-type", [b"text/plain", b"\xff", b"application/json; charset=utf-16", b"multipart/form-data"]),
    ("host", [b"", b"[", b"evil.example", b"127.0.0.1:99999", b"\xff", b"a" * 5000]),
    ("content-encoding", [b"gzip"]),
    ("accept", [b"text/event-stream", b"\xff"]),
]  # fmt: skip
PATHS = [
    "/v1/chat/completions", "/v1/responses", "/v1/messages", "/chat/completions", "/v1/v1/messages", "/sessions",
    "/v1/sessions", "/sessions/{online}/reward", "/sessions/{online}/end", "/s/{token}/v1/responses",
    "/s/{token}/messages", "/s/%ff/v1/messages", "/s/../v1/responses", "/sessions/%00/reward", "/models",
    "/health", "/v1/nothing", "/v1/completions", "/v1/messages/count_tokens", "/v1/models/default", "/v1/models/a/b",
    "/v1/models/%ff", "/v1/responses/{completion}", "/v1/responses/%00", "/s/{token}/v1/messages/count_tokens",
]  # fmt: skip
QUESTION = {"role": "user", "content": "Sort 5291"}
RUN_TOOL = {"type": "custom", "name": "add", "custom": {"name": "add"}, "format": {"type": "text"}}
WRITTEN: list[tuple[str, Any]] = [
    ("/v1/completions", {"prompt": "Sort 5291", "logprobs": 2, "n": 2, "stop": ["9"], "logit_bias": {"5": 3}}),
    ("/v1/completions", {"prompt": [5, 6, 7], "max_tokens": 4, "stream": True, "n": 2, "logprobs": 0}),
    ("/v1/messages/count_tokens", {"messages": [QUESTION], "system": "be brief", "tools": []}),
    ("/v1/messages", {"messages": [QUESTION, {"role": "assistant", "content": "1"}], "max_tokens": 9, "stream": True}),
    (
        "/v1/chat/completions",
        {
            **{"messages": [QUESTION], "stream": True, "n": 2, "logprobs": True, "top_logprobs": 3, "seed": 1},
            **{"frequency_penalty": 1, "presence_penalty": -1, "logit_bias": {"5": 3}, "reasoning_effort": "low"},
        },
    ),
    (
        "/v1/chat/completions",
        {
            "messages": [
                QUESTION,
                {"role": "assistant", "content": None, "function_call": {"name": "add", "arguments": "{}"}},
                {"role": "function", "name": "add", "content": "7"},
            ],
            "functions": [{"name": "add", "parameters": {"type": "object", "properties": {}}}],
            "function_call": {"name": "add"},
        },
    ),
    (
        "/v1/responses",
        {
            **{"input": [QUESTION], "include": ["message.output_text.logprobs"], "top_logprobs": 2, "store": True},
            **{"truncation": "auto", "reasoning": {"effort": "none"}, "tools": [RUN_TOOL], "stream": True},
            "tool_choice": {"type": "allowed_tools", "mode": "required", "tools": [{"type": "custom", "name": "add"}]},
        },
    ),
    ("/v1/chat/completions", {"messages": [QUESTION], "tools": [RUN_TOOL], "tool_choice": RUN_TOOL, "max_tokens": 5}),
]
"""Requests that no recorded client sends: a route or a field of each kind."""
WRITTEN_WEIGHT = 4
METHODS = ["POST", "POST", "POST", "POST", "POST", "GET", "DELETE", "PUT"]


@dataclass(frozen=True)
class Attack:
    """One request. In its path `{token}` and `{online}` stand for a session of the proxy that it is sent to."""

    family: str
    method: str
    path: str
    body: bytes
    headers: tuple[tuple[str, bytes], ...] = ()

    def __str__(self) -> str:
        headers = "".join(f"\n  {name}: {value!r}" for name, value in self.headers)
        return f"{self.method} {self.path} ({self.family}){headers}\n  {self.body!r}"


@dataclass
class Report:
    seed: int
    statuses: Counter[int] = field(default_factory=Counter)
    failures: list[tuple[Attack, str]] = field(default_factory=list)
    slowest_seconds: float = 0.0
    seconds: float = 0.0

    @property
    def smallest(self) -> tuple[Attack, str] | None:
        return min(self.failures, key=lambda failure: len(failure[0].body), default=None)

    def __str__(self) -> str:
        counts = ", ".join(f"{status}: {count}" for status, count in sorted(self.statuses.items()))
        lines = [
            f"seed {self.seed}: {self.statuses.total()} requests in {self.seconds:.0f} s "
            f"(the slowest took {self.slowest_seconds:.2f} s)",
            f"  {counts}",
            f"  failures: {len(self.failures)}",
        ]
        if self.smallest is not None:
            attack, why = self.smallest
            lines.append(f"the smallest failure, {why}:\n{attack}")
        return "\n".join(lines)


class Mutator:
    """Makes requests from recorded ones. The same seed makes the same requests."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        requests = [request for path in sorted(RECORDED.glob("*.json")) for request in json.loads(path.read_text())]
        if not requests:
            raise FileNotFoundError(f"there must be recorded requests in {RECORDED}, got none")
        self._recorded: list[tuple[str, Any]] = [(request["path"], request["body"]) for request in requests]
        rewards = [1.0, None, {"{completion}": 0.5}, {"{completion}": 1, "other": 2}]
        self._recorded += [("/sessions/{online}/reward", {"reward": reward}) for reward in rewards]
        self._recorded += [(path, body) for path, body in WRITTEN for _ in range(WRITTEN_WEIGHT)]

    def attacks(self, count: int) -> Iterator[Attack]:
        return (self._attack() for _ in range(count))

    def _attack(self) -> Attack:
        draw = self._random
        path, recorded = draw.choice(self._recorded)
        body = _copy(recorded)
        if not path.startswith("/sessions") and draw.random() < 0.4:
            self._constrain(body)
        for _ in range(draw.choice((0, 1, 1, 1, 1, 2, 2, 3, 6))):
            body = self._mutated(body)
        raw = _dumped(body)
        if draw.random() < 0.1:
            raw = self._damaged(raw)
        if draw.random() < 0.1:
            path = draw.choice(PATHS)
        headers = tuple((name, draw.choice(values)) for name, values in HEADERS if draw.random() < 0.03)
        method = draw.choice(METHODS) if draw.random() < 0.05 else "POST"
        return Attack(draw.choice(list(FAMILIES)), method, path, raw, headers)

    def _constrain(self, body: dict[str, Any]) -> None:
        """Ask for an answer of a certain form, in one of the dialects' ways of asking."""
        draw = self._random
        schema = _copy(draw.choice(SCHEMAS))
        strict = draw.choice((True, False, None))
        function = {"name": draw.choice(("add", "a.b", MARK * 300)), "parameters": schema, "strict": strict}
        kind = draw.randrange(5)
        if kind == 0:
            body["response_format"] = {"type": "json_schema", "json_schema": {"schema": schema, "strict": strict}}
        elif kind == 1:
            body["text"] = {"format": {"type": "json_schema", "schema": schema, "strict": strict}}
        elif kind == 2:
            body["output_config"] = {"format": {"type": "json_schema", "schema": schema}}
        else:
            nested = {"type": "function", "function": function}
            flat = {"type": draw.choice(("function", "custom")), **function, "input_schema": schema}
            body["tools"] = [nested if kind == 3 else flat]
            named = {"type": "function", "name": "add", "function": {"name": "add"}}
            body["tool_choice"] = draw.choice(
                ("required", "auto", named, {"type": "any"}, {"type": "tool", "name": "add"})
            )

    def _mutated(self, body: Any) -> Any:
        """The body with one change at a random place."""
        draw = self._random
        places, room = _places(body), _depth(body) < 110
        place, key = draw.choice([(None, None), *places])
        if place is None:
            return body if draw.random() < 0.7 else self._value(body, room)
        change = draw.randrange(7)
        if change == 0 and isinstance(place, dict):
            del place[key]
        elif change == 1 and isinstance(place, dict):
            place[draw.choice(FIELDS)] = place.pop(key)
        elif change == 2:
            other = place if isinstance(place, dict) else place[key]
            if isinstance(other, dict):
                other[draw.choice((*FIELDS, MARK * 1000))] = self._value(None, room)
        elif change == 3 and isinstance(place, list) and len(places) < 1000:
            place.extend(_copy(place[key]) for _ in range(draw.choice((1, 2, 40))))
        elif change == 4:
            _, other = draw.choice(self._recorded)
            inner, inner_key = draw.choice(_places(other))
            place[key] = _copy(inner[inner_key])
        else:
            place[key] = self._value(place[key], room)
        return body

    def _value(self, old: Any, room: bool = True) -> Any:
        """Another value; not `room` = it is not nested much more deeply, since what made it could not write it."""
        draw = self._random
        kind = draw.randrange(8)
        if kind <= 1:
            return draw.choice(TEXTS)
        if kind == 2:
            return draw.choice(NUMBERS)
        if kind == 3:
            return _copy(draw.choice(EMPTY))
        if kind == 4:
            return _copy(draw.choice(SCHEMAS))
        if kind == 5:
            return [_copy(old)] if draw.random() < 0.5 else {draw.choice(FIELDS): _copy(old)}
        if kind == 6:
            nested = _copy(old)
            for _ in range(draw.choice((3, 30, 110)) if room else 1):
                nested = [nested] if draw.random() < 0.5 else {draw.choice(FIELDS): nested}
            return nested
        return old[:-1] if isinstance(old, str | list) else draw.choice(FIELDS)

    def _damaged(self, raw: bytes) -> bytes:
        draw = self._random
        at = draw.randrange(len(raw) + 1)
        return draw.choice(
            (
                raw[:at],
                raw[:at] + bytes(draw.randrange(256) for _ in range(3)) + raw[at:],
                raw[:at] + b"\xed\xa0\x80" + raw[at:],
                b"\xef\xbb\xbf" + raw,
                raw + raw,
                b"[" * draw.choice((10, 200, 100_000)),
                b'{"messages":' * draw.choice((10, 1000)),
                raw.replace(b"{", b'{"model": "x", "model": [], "messages": 1, ', 1),
                raw.replace(b'"', b"'"),
                raw.decode("utf-8", "replace").encode("utf-16"),
                b"",
            )
        )


def _copy(value: Any) -> Any:
    return json.loads(json.dumps(value))


def _places(body: Any) -> list[tuple[Any, Any]]:
    """Every container inside the body with each of its keys or indexes."""
    found: list[tuple[Any, Any]] = []
    containers = [body]
    for container in containers:
        found += [(container, key) for key in _keys(container)]
        containers += [container[key] for key in _keys(container)]
    return found


def _depth(value: Any) -> int:
    depth, level = 0, [value]
    while level:
        depth += 1
        level = [inner[key] for inner in level for key in _keys(inner)]
    return depth


def _keys(value: Any) -> Any:
    return value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()


def _dumped(body: Any) -> bytes:
    raw = json.dumps(body, ensure_ascii=True).encode()
    for text, token in RAW.items():
        raw = raw.replace(json.dumps(text).encode(), token)
    return raw


class Target:
    """A proxy of one model family, without a socket, and the sessions that requests are sent to."""

    def __init__(self, family: str) -> None:
        tokenizer = make_tokenizer(["Sort 5291 into 1259, hello there, add the numbers"] * 4, 300, POSITIONS)
        self._answers = FAMILIES[family]
        self._tokenizer = tokenizer
        self._number = 0
        constrained = None in self._answers
        self.engine = FakeEngine(
            vocab_size=len(tokenizer),
            tokenizer=tokenizer,
            max_positions=POSITIONS,
            script=None if constrained else self._answer,
            constrained=constrained,
        )
        gconfig = GenerationHyperparameters(max_new_tokens=24)
        self.proxy = Proxy(
            self.engine,
            tokenizer,
            gconfig=gconfig,
            max_positions=POSITIONS,
            tool_parser=family,
            self_reward=True,
            trained=family != SERVED,
        )

    async def start(self) -> None:
        await self.proxy.start()
        self.session, self.online = self._open()

    async def send(self, attack: Attack) -> tuple[int, bytes]:
        """Its status and the body of its answer."""
        self._number += 1
        if self._number % SESSION_REQUESTS == 0 or self.session.ended:
            await self._replace_sessions()
        self.engine.requests.clear()
        last = self.session.tree.last
        completion = b"none" if last is None else last.id.encode()
        path = attack.path.replace("{token}", self.session.token).replace("{online}", self.online)
        path = path.replace("{completion}", completion.decode())
        headers = {b"authorization": f"Bearer {self.session.api_key}".encode()}
        headers |= {name.encode(): value for name, value in attack.headers}
        answer = await self.proxy.http_client.request(
            attack.method,
            self.proxy.origin + path,
            content=attack.body.replace(b"{completion}", completion),
            headers=headers,
        )
        return answer.status_code, answer.content

    async def check_alive(self) -> None:
        """It serves as before, and nothing is left running."""
        await self.engine.until_in_flight(0)
        question = {"messages": [{"role": "user", "content": "Sort 5291"}]}
        answer = await self.proxy.http_client.post(
            f"{self.proxy.open_session().base_url}/chat/completions", json=question
        )
        assert answer.status_code == 200, answer.text

    def _answer(self, prompt: Any) -> list[int]:
        text = self._answers[len(prompt) % 2]
        return [*self._tokenizer.encode(text, add_special_tokens=False), self._tokenizer.eos_token_id]

    def _open(self) -> tuple[Session, str]:
        online = self.proxy.online.open()
        return online.session, online.id

    async def _replace_sessions(self) -> None:
        for session in list(self.proxy._sessions):  # mutated requests may have opened more
            await self.proxy.end_session(session)
        await self.proxy.online.aclose()
        self.session, self.online = self._open()


async def fuzz(
    count: int, seed: int, *, deadline_seconds: float = DEADLINE_SECONDS, progress: Callable[[str], None] | None = None
) -> Report:
    """Send `count` requests made from `seed`."""
    targets = {family: Target(family) for family in FAMILIES}
    report = Report(seed)
    begin = time.monotonic()
    try:
        for target in targets.values():
            await target.start()
        for number, attack in enumerate(Mutator(seed).attacks(count), start=1):
            why = await _judge(targets[attack.family], attack, report, deadline_seconds)
            if why is not None:
                report.failures.append((attack, why))
            if progress is not None and number % 5000 == 0:
                progress(f"{number} of {count}, failures: {len(report.failures)}")
        if report.smallest is not None:
            attack, why = report.smallest
            report.failures.append(await _shrink(targets[attack.family], attack, why, deadline_seconds))
        else:
            for target in targets.values():
                await target.check_alive()
    finally:
        for target in targets.values():
            await target.proxy.aclose()
    report.seconds = time.monotonic() - begin
    return report


async def _judge(target: Target, attack: Attack, report: Report, deadline_seconds: float) -> str | None:
    """What is wrong with the answer to a request; None = nothing."""
    begin = time.monotonic()
    try:
        with _interrupted_after(deadline_seconds):
            async with asyncio.timeout(deadline_seconds):
                status, answer = await target.send(attack)
    except Exception as error:
        report.statuses[NO_ANSWER] += 1
        return f"no answer ({type(error).__name__}: {error})"
    seconds = time.monotonic() - begin
    report.slowest_seconds = max(report.slowest_seconds, seconds)
    report.statuses[status] += 1
    if status >= 500:
        return f"a status of {status}"
    try:
        _parse_everywhere(attack.body)
    except Exception as error:
        return f"a dialect that cannot read it ({type(error).__name__}: {error})"
    if seconds > deadline_seconds:
        return f"an answer after {seconds:.1f} s"
    if status >= 400 and (echoed := _marks(answer)) > ECHO_CHARACTERS:
        return f"an error that repeats {echoed} characters of its request: {answer[:600]!r}"
    return None


def _marks(answer: bytes) -> int:
    return answer.count(MARK.encode()) + answer.count(json.dumps(MARK)[1:-1].encode())


def _parse_everywhere(raw: bytes) -> None:
    """Also read the body as every dialect does for a model with images, and for a proxy that drops parameters."""
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError):
        return
    if not isinstance(body, dict):
        return
    for dialect in DIALECTS.values():
        for rules in OTHER_RULES:
            try:
                dialect.parse(body, rules)
            except (ApiError, RecursionError):
                continue


OTHER_RULES = (ParameterRules(images=ImageCache()), ParameterRules(drop_params=True))


class TookTooLong(Exception):
    """Code held the event loop beyond the deadline of a request."""


@contextmanager
def _interrupted_after(seconds: float) -> Iterator[None]:
    """Interrupt even code that never returns to the event loop."""

    def interrupt(*_: object) -> None:
        raise TookTooLong(f"no answer within {seconds:g} s")

    former = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds + 1)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, former)


async def _shrink(target: Target, attack: Attack, why: str, deadline_seconds: float) -> tuple[Attack, str]:
    """The request without the parts that its failure does not need."""
    for smaller in (replace(attack, headers=()), replace(attack, method="POST")):
        attack = smaller if await _judge(target, smaller, Report(0), deadline_seconds) else attack
    try:
        body = json.loads(attack.body)
    except (ValueError, RecursionError):
        return attack, why
    attempts, shrinking = 0, True
    while shrinking:
        shrinking = False
        for number in range(len(_places(body))):
            smaller_body = _copy(body)
            places = _places(smaller_body)
            if number >= len(places) or attempts >= SHRINKING_ATTEMPTS:
                break
            container, key = places[number]
            del container[key]
            attempts += 1
            smaller = replace(attack, body=json.dumps(smaller_body).encode())
            found = await _judge(target, smaller, Report(0), deadline_seconds)
            if found is not None:
                attack, why, body, shrinking = smaller, found, smaller_body, True
                break
    return attack, why


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--count", type=int, default=20_000, help="how many requests (default: %(default)s)")
    parser.add_argument(
        "--seed", type=int, default=1, help="the same seed sends the same requests (default: %(default)s)"
    )
    parser.add_argument(
        "--deadline", type=float, default=DEADLINE_SECONDS, help="seconds for each (default: %(default)s)"
    )
    args = parser.parse_args()
    report = asyncio.run(
        fuzz(args.count, args.seed, deadline_seconds=args.deadline, progress=lambda line: print(line, file=sys.stderr))
    )
    print(report)
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main())
