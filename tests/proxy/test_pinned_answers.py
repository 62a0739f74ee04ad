"""Answers to recorded requests, byte for byte as they were when they were written down; ids and times apart.

To accept a change of what clients get: `python -m pytest tests/proxy/test_pinned_answers.py` with PIN_ANSWERS=1 in the
environment writes the answers down again; the difference is then for a person to read.
"""

import json
import os
import re
from pathlib import Path
from typing import Any

import httpx
import pytest
from conversations import CALL

from areal.proxy import Proxy, Session

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
RECORDED = sorted((HERE / "clients").glob("*.json"))
PINNED = HERE / "pinned_answers.json"
ANSWERS = {"text": "It is 5.", "call": f"I add.\n{CALL}"}
NAME = re.compile(r"[0-9a-f]{20}")
"""Of an answer: the ids of everything in it are made of it."""
TIME = re.compile(r'("created(?:_at)?"|"completed_at"):[0-9.]+')
SENT_HEADERS = ("x-stainless", "accept", "content-type", "user-agent", "anthropic")


def without_names_and_times(text: str) -> str:
    return TIME.sub(r"\1:TIME", NAME.sub("NAME", text))


async def answer_to(http: httpx.AsyncClient, proxy: Proxy, session: Session, recorded: dict[str, Any]) -> str:
    """Status, headers and body."""
    headers = {name: value for name, value in recorded["headers"].items() if name.startswith(SENT_HEADERS)}
    response = await http.request(
        recorded["method"],
        proxy.origin + recorded["path"],
        json=recorded["body"],
        headers=headers | {"authorization": f"Bearer {session.api_key}"},
    )
    told = {name: response.headers.get(name) for name in ("content-type", "cache-control", "content-length")}
    return without_names_and_times(f"{response.status_code} {json.dumps(told)}\n{response.text}")


async def answers(proxy: Proxy, engine: Any, http: httpx.AsyncClient) -> dict[str, str]:
    found = {}
    for path in RECORDED:
        for number, recorded in enumerate(json.loads(path.read_text())):
            for kind, engine.answer in ANSWERS.items():
                session = proxy.open_session()
                found[f"{path.stem}-{number}-{kind}"] = await answer_to(http, proxy, session, recorded)
                await proxy.end_session(session)
    return found


async def test_recorded_requests_get_the_answers_that_were_written_down(start_proxy, engine, transport):
    proxy = await start_proxy(max_positions=4096)
    if transport == "in process":
        found = await answers(proxy, engine, proxy.http_client)
    else:
        async with httpx.AsyncClient(trust_env=False) as http:
            found = await answers(proxy, engine, http)
    if os.environ.get("PIN_ANSWERS"):
        PINNED.write_text(json.dumps(found, indent=0, ensure_ascii=False) + "\n")
    pinned = json.loads(PINNED.read_text())
    assert found.keys() == pinned.keys()
    for name, text in pinned.items():
        assert found[name] == text, name
