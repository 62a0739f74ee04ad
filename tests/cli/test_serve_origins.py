"""Which pages of other sites may call a served model: those that were named, and no other."""

import pytest
from starlette.responses import PlainTextResponse
from starlette.testclient import TestClient

from areal.cli.serve import KEY_REMEDY, _around, _origin
from areal.config.errors import ConfigError

PREFLIGHT = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}


def client(*origins: str) -> TestClient:
    return TestClient(_around(PlainTextResponse("the proxy"), "model", list(origins)))


def test_a_named_origin_may_call_and_read_the_requests_id() -> None:
    headers = {"origin": "https://example.org"}
    allowed = client("https://example.org").options("/v1/chat/completions", headers=headers | PREFLIGHT)
    assert allowed.headers["access-control-allow-origin"] == "https://example.org"
    answer = client("https://example.org").get("/v1/models", headers=headers)
    assert answer.headers["access-control-allow-origin"] == "https://example.org"
    assert "x-request-id" in answer.headers["access-control-expose-headers"]


@pytest.mark.parametrize("origins", [(), ("https://example.org",)])
def test_no_other_may(origins: tuple[str, ...]) -> None:
    for headers in ({"origin": "https://evil.example"}, {"origin": "https://example.org.evil.example"}):
        for answer in (
            client(*origins).options("/v1/chat/completions", headers=headers | PREFLIGHT),
            client(*origins).get("/v1/models", headers=headers),
        ):
            assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize(
    "wrong", ["*", "example.org", "https://example.org/", "https://example.org/page", "ftp://a", ""]
)
def test_what_is_no_origin_is_refused_at_the_start(wrong: str) -> None:
    with pytest.raises(ConfigError, match="cors-origin"):
        _origin(wrong)
    assert _origin("http://localhost:3000") == "http://localhost:3000"


def test_the_remedy_for_a_wrong_key_speaks_of_serve() -> None:
    assert "areal serve" in KEY_REMEDY
    assert "extra_kwargs" not in KEY_REMEDY
