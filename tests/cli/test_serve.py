import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from openai import OpenAI

from areal.cli.main import main

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
KEY = "sk-chosen-by-me"
SECONDS = 120


FAILING = """
import sys
from areal.cli.main import main
from areal.engine.inference.decoder_runner import DecoderRunner

def forward(self, *args):
    raise RuntimeError("out of memory")

DecoderRunner.forward = forward
sys.exit(main(sys.argv[1:]))
"""


def start(*words: str, program: tuple[str, ...] = ("-m", "areal.cli.main"), **environ: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *program, "serve", "--port", "0", *words],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def url_of(server: subprocess.Popen[str]) -> str:
    assert server.stdout is not None
    line = server.stdout.readline()
    assert " is served at http://127.0.0.1:" in line, line + (server.stderr.read() if server.stderr else "")
    return line.split(" is served at ")[1].split()[0]


def ending(server: subprocess.Popen[str], number: int) -> tuple[int, str]:
    server.send_signal(number)
    _, errors = server.communicate(timeout=SECONDS)
    return server.returncode, errors


@pytest.fixture(scope="module")
def served(tiny_math: Path) -> Iterator[str]:
    server = start("--model", "builtin:tiny-math", "--api-key", KEY)
    try:
        yield url_of(server)
    finally:
        code, errors = ending(server, signal.SIGTERM)
    assert (code, errors) == (0, "")


def test_any_client_can_be_pointed_at_it(served: str) -> None:
    with OpenAI(base_url=served, api_key=KEY, max_retries=0) as client:
        question = {"role": "user", "content": "Sort 5291"}
        answer = client.chat.completions.create(model="any", messages=[question])  # type: ignore[list-item]
        assert answer.choices[0].message.content
        first = client.responses.create(model="any", input="Sort 5291")
        second = client.responses.create(model="any", input="Sort 12", previous_response_id=first.id)
        assert second.previous_response_id == first.id
        chunks = list(client.chat.completions.create(model="any", messages=[question], stream=True))  # type: ignore[call-overload]
        assert chunks[-1].choices[0].finish_reason


def test_models_names_the_model_it_serves(served: str) -> None:
    with OpenAI(base_url=served, api_key=KEY) as client:
        assert [model.id for model in client.models.list()] == ["builtin:tiny-math"]


@pytest.mark.parametrize("key", ["", "wrong", KEY + "x", KEY[:-1]])
def test_only_its_key_passes(served: str, key: str) -> None:
    headers = {"x-api-key": key} if key else {}
    body = {"messages": [{"role": "user", "content": "hi"}]}
    assert httpx.post(f"{served}/chat/completions", json=body, headers=headers).status_code == 401
    assert httpx.get(f"{served}/models", headers=headers).status_code == 401
    assert httpx.post(f"{served}/sessions", headers=headers).status_code == 401


def test_its_key_manages_no_sessions(served: str) -> None:
    assert httpx.post(f"{served}/sessions", headers={"x-api-key": KEY}).status_code == 403


def test_without_a_key_one_is_made_and_printed_and_ctrl_c_ends_it() -> None:
    server = start()
    url = url_of(server)
    assert server.stdout is not None
    key = server.stdout.readline().removeprefix("api key: ").strip()
    assert len(key) > 40
    assert httpx.get(f"{url}/models", headers={"x-api-key": key}).status_code == 200
    assert ending(server, signal.SIGINT) == (0, "")


def test_key_in_a_file_is_on_no_command_line(tiny_math: Path, tmp_path: Path) -> None:
    (tmp_path / "key").write_text(KEY + "\n")
    server = start("--model", "builtin:tiny-math", "--api-key-file", str(tmp_path / "key"))
    url = url_of(server)
    assert httpx.get(f"{url}/models", headers={"x-api-key": KEY}).status_code == 200
    assert KEY.encode() not in Path(f"/proc/{server.pid}/cmdline").read_bytes()
    assert ending(server, signal.SIGTERM) == (0, "")


def test_key_and_a_file_with_one_are_refused_together(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["serve", "--api-key", KEY, "--api-key-file", "key"])
    assert "not allowed with" in capsys.readouterr().err


def test_request_for_another_host_is_refused(served: str) -> None:
    headers = {"x-api-key": KEY, "host": "evil.example"}
    assert httpx.get(f"{served}/models", headers=headers).status_code == 421


def test_an_engine_that_has_failed_ends_it_with_the_cause(tiny_math: Path) -> None:
    server = start("--model", "builtin:tiny-math", "--api-key", KEY, program=("-c", FAILING))
    body = {"messages": [{"role": "user", "content": "hi"}]}
    answer = httpx.post(f"{url_of(server)}/chat/completions", json=body, headers={"x-api-key": KEY}, timeout=SECONDS)
    assert answer.status_code in (410, 503)  # from the engine, or from the server that ends because of it
    _, errors = server.communicate(timeout=SECONDS)
    assert server.returncode == 2
    assert errors.splitlines()[-1].endswith("the engine failed: RuntimeError('out of memory')")


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1"])
def test_listening_beyond_this_machine_needs_a_key(
    host: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AREAL_API_KEY", raising=False)
    assert main(["serve", "--host", host, "--port", "0"]) == 2
    assert "--api-key" in capsys.readouterr().err


@pytest.mark.parametrize("key", ["", " ", "a b", "schlüssel", "line\nbreak"])
def test_key_that_fits_no_header_is_refused(key: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--port", "0", "--api-key", key]) == 2
    assert "--api-key" in capsys.readouterr().err


def test_model_that_is_not_there_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--model", "./nowhere", "--port", "0"]) == 2
    assert "nowhere" in capsys.readouterr().err
