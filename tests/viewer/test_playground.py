"""The page beside a served model: it is there without a key, changes nothing of the API, and holds no secret."""

import pytest
from starlette.responses import PlainTextResponse
from starlette.testclient import TestClient

from areal.viewer.playground import WithPlayground


@pytest.fixture
def client() -> TestClient:
    return TestClient(WithPlayground(PlainTextResponse("the proxy"), "<b>model"), base_url="http://127.0.0.1:8000")


def test_the_page_runs_no_script_but_its_file(client: TestClient) -> None:
    page = client.get("/playground")
    assert page.status_code == 200
    assert "script-src 'self'" in page.headers["content-security-policy"]
    assert "<b>model" not in page.text
    assert client.get("/static/playground.js").status_code == 200


@pytest.mark.parametrize("path", ["/", "/v1/models", "/playground/", "/v1/playground", "/health"])
def test_everything_else_is_the_proxys(client: TestClient, path: str) -> None:
    answer = client.get(path)
    assert answer.text == "the proxy"
    assert "content-security-policy" not in answer.headers


@pytest.mark.parametrize("path", ["/static/nothing.js", "/static/..%2fapp.py", "/static/a/b"])
def test_no_other_file_is_served(client: TestClient, path: str) -> None:
    assert client.get(path).status_code == 404


def test_nothing_can_be_sent_to_the_page(client: TestClient) -> None:
    assert client.post("/playground").status_code == 405
