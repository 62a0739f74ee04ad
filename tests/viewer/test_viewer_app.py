"""Pages show what a store has; nothing that a model said or a client sends is more than text."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from areal.api.messages import Episode, GroupResult, Node
from areal.store.schema import FAILED, STORE_FILE
from areal.store.writer import StoreWriter
from areal.viewer.app import Viewer
from areal.viewer.html import el, escape, visible
from areal.viewer.server import Guarded
from tests.viewer.viewed_runs import HOSTILE, LONG, row_of, write_run

RUN = "/r/small.one"
PAGES = [
    "/",
    "/compare?run=small.one&run=small.two",
    f"{RUN}/",
    f"{RUN}/live",
    f"{RUN}/figures.json",
    f"{RUN}/episodes",
    f"{RUN}/episodes?filter=reward<1&order=-tokens",
    f"{RUN}/episodes/1",
    f"{RUN}/episodes/3",
    f"{RUN}/episodes/4",
    f"{RUN}/groups/0",
    f"{RUN}/groups/1",
    f"{RUN}/rejections",
    f"{RUN}/rescored",
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("runs")
    write_run(place / "small" / "one")
    write_run(place / "small" / "two", lr=6e-4)
    return place


@pytest.fixture(scope="module")
def client(runs: Path) -> TestClient:
    return TestClient(Guarded(Viewer([runs]).asgi()), base_url="http://127.0.0.1:8265")


class Seen(HTMLParser):
    """What a browser would make of a page: its elements and their attributes, and its text."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


def data_of(page: str, name: str) -> Any:
    found = re.search(rf'<script type="application/json" id="{name}">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def episode_with(client: TestClient, place: int) -> str:
    """The address of the episode that said something hostile."""
    rows = client.get(f"{RUN}/episodes.json?filter=group:3&order=sample").json()["rows"]
    return f"{RUN}/episodes/{rows[place][0]}"


@pytest.mark.parametrize("address", PAGES)
def test_every_page_is_there_and_runs_no_script_but_its_files(client: TestClient, address: str) -> None:
    answer = client.get(address)
    assert answer.status_code == 200
    assert "script-src 'self'" in answer.headers["content-security-policy"]
    assert answer.headers["x-content-type-options"] == "nosniff"
    for tag, attributes in Seen(answer.text).elements:
        assert not any(name.startswith("on") or name == "style" for name in attributes), (tag, attributes)
        if tag == "script":
            assert attributes.get("type") == "application/json" or str(attributes["src"]).startswith("/static/")


def test_the_list_says_what_a_run_learnt_and_what_is_set_differently(client: TestClient) -> None:
    text = Seen(client.get("/").text).text
    assert "finished" in text
    assert "0.25 → 0.75" in text
    assert "actor.optimizer.lr=0.0006" in text
    assert "tokenizer_path" not in text


def test_a_run_has_its_verdict_and_its_curves(client: TestClient) -> None:
    page = client.get(f"{RUN}/").text
    assert "held-out success 0.25 → 0.75" in page
    data = data_of(page, "run-data")
    assert data["steps"] == [1, 2]
    assert data["figures"]["reward"] == [0.75, 0.0]
    assert [point[:4] for point in data["held_out"]["sampled"]] == [[0, 0.25, 0.15, 0.35], [2, 0.75, 0.65, 0.85]]


def test_several_runs_are_compared_on_one_page(client: TestClient) -> None:
    page = client.get("/compare?run=small.one&run=small.two&run=small.one").text
    assert [each["name"] for each in data_of(page, "compare-data")["runs"]] == ["small/one", "small/two"]


def test_a_table_goes_on_where_its_page_ended(client: TestClient) -> None:
    first = client.get(f"{RUN}/episodes.json?order=-tokens&limit=5").json()
    goes_on = {"order": "-tokens", "limit": "100", "after": json.dumps(first["next"])}
    rest = client.get(f"{RUN}/episodes.json", params=goes_on).json()
    everything = client.get(f"{RUN}/episodes.json?order=-tokens&limit=100").json()
    assert first["rows"] + rest["rows"] == everything["rows"]
    assert everything["count"] == len(everything["rows"]) == 13


def test_a_wrong_filter_is_answered_as_the_store_answers_it(client: TestClient) -> None:
    answer = client.get(f"{RUN}/episodes.json?filter=rewrd<1")
    assert answer.status_code == 400
    assert answer.json()["error"] == "there is no column 'rewrd'; did you mean reward?"
    assert "did you mean reward?" in Seen(client.get(f"{RUN}/episodes?filter=rewrd<1").text).text


@pytest.mark.parametrize(
    "line", ["'; DROP TABLE episodes --", '"', "reward<" + "9" * 1000, "x" * 5000, "\x00", "(" * 500]
)
def test_no_filter_does_more_than_find(client: TestClient, line: str) -> None:
    for name in ("episodes.json", "episodes"):
        assert client.get(f"{RUN}/{name}", params={"filter": line}).status_code in (200, 400)
    assert client.get(f"{RUN}/episodes.json").json()["count"] == 13


@pytest.mark.parametrize("after", ["[1]", "null", "{}", "[1, 2, 3]", '["a", 1]', "[null, 1.5]", "[[], 2]", "x"])
def test_a_place_that_no_page_gave_is_refused(client: TestClient, after: str) -> None:
    assert client.get(f"{RUN}/episodes.json", params={"after": after}).status_code == 400


@pytest.mark.parametrize("place", range(len(HOSTILE)))
def test_what_a_model_says_is_text(client: TestClient, place: int) -> None:
    page = client.get(episode_with(client, place))
    assert page.status_code == 200
    seen = Seen(page.text)
    assert not any(tag in ("img", "b") for tag, _ in seen.elements)
    assert sum(tag == "script" for tag, _ in seen.elements) == sum(
        tag == "script" and ("src" in of or of.get("type") == "application/json") for tag, of in seen.elements
    )
    assert visible(HOSTILE[place]) in seen.text
    assert not any(ord(each) < 32 and each not in "\n\t" for each in page.text)
    assert "\u202e" not in page.text


def test_hostile_text_is_text_in_every_list_of_episodes(client: TestClient) -> None:
    page = client.get(f"{RUN}/episodes").text
    rows = data_of(page, "episodes-data")["rows"]
    assert visible(HOSTILE[0]) in [row[-1] for row in rows]
    assert "<script>alert" not in page
    assert "<img src=x" not in client.get(f"{RUN}/groups/3").text
    assert "<b>here</b>" not in client.get(f"{RUN}/rejections").text


def test_a_megabyte_in_one_line_is_cut_on_the_page_and_whole_as_a_file(client: TestClient) -> None:
    address = episode_with(client, len(HOSTILE))
    page = client.get(address)
    assert len(page.content) < 100_000
    whole = client.get(f"{address}/1.txt")
    assert whole.text == LONG
    assert whole.headers["content-type"].startswith("text/plain")
    assert client.get(f"{address}/2.txt").status_code == 404


def test_a_conversation_shows_tools_rewards_and_the_expected_answer(client: TestClient) -> None:
    seen = Seen(client.get(f"{RUN}/episodes/4").text)
    for text in (
        "where is 7?",
        "[image_url]",
        "look_up",
        "it is lost",
        "let me see",
        "7 <b>",
        "reward 0.5",
        "return 0.9",
    ):
        assert text in seen.text
    assert "advantage +0.25" in seen.text


def test_a_tree_shows_each_message_once_and_why_it_forked(client: TestClient) -> None:
    text = Seen(client.get(f"{RUN}/episodes/3").text).text
    for said in ("left", "right", "begin"):
        assert text.count(f"user{said}") == 1
    assert "Answer 2 continues the same conversation as answer 0" not in text
    assert "Answer 2 continues the same conversation as answer 1 with other messages." in text
    assert "rendered the conversation up to answer 1 differently" in text
    assert "after 3 common tokens" in text


def test_a_group_without_signal_says_so(client: TestClient) -> None:
    assert "No signal" in client.get(f"{RUN}/groups/0").text
    assert "No signal" not in client.get(f"{RUN}/groups/1").text


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8265", "127.0.0.1.evil.example", "10.0.0.1", ""])
def test_a_foreign_host_is_refused(client: TestClient, host: str) -> None:
    assert client.get("/", headers={"host": host}).status_code == 421


@pytest.mark.parametrize("host", ["localhost:1", "127.0.0.1", "[::1]:8265"])
def test_names_of_this_machine_are_served(client: TestClient, host: str) -> None:
    assert client.get("/", headers={"host": host}).status_code == 200


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://127.0.0.1:9999", "file://"])
def test_a_page_of_another_site_may_not_ask(client: TestClient, origin: str) -> None:
    assert client.get("/", headers={"origin": origin}).status_code == 403


def test_its_own_pages_may_ask(client: TestClient) -> None:
    assert client.get(f"{RUN}/episodes.json", headers={"origin": "http://127.0.0.1:8265"}).status_code == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_nothing_can_be_changed(client: TestClient, method: str) -> None:
    assert client.request(method, f"{RUN}/").status_code == 405


@pytest.mark.parametrize(
    "path",
    [
        "/r/nobody/",
        "/r/../../etc/passwd",
        "/r/%2e%2e%2f%2e%2e/",
        "/static/..%2f..%2fapp.py",
        "/static/%2e%2e/app.py",
        f"{RUN}/episodes/999999",
        f"{RUN}/episodes/99999999999999999999999",
        f"{RUN}/episodes/-1",
        f"{RUN}/episodes/1e3",
        f"{RUN}/episodes/٣",
        f"{RUN}/groups/77",
        f"{RUN}/rescored/..%2f..%2fconfig",
        f"{RUN}/rescored/none",
        "/compare?run=nobody",
        "/favicon.ico",
    ],
)
def test_what_is_not_there_is_a_page_that_says_so(client: TestClient, path: str) -> None:
    answer = client.get(path)
    assert answer.status_code == 404
    assert "Traceback" not in answer.text


def test_beyond_loopback_the_token_of_the_address_is_needed(runs: Path) -> None:
    app = Guarded(Viewer([runs]).asgi(), token="secret")
    stranger = TestClient(app, base_url="http://10.0.0.1:8265")
    assert stranger.get("/").status_code == 403
    assert stranger.get("/?token=wrong").status_code == 403
    assert stranger.get("/static/viewer.css").status_code == 403
    friend = TestClient(app, base_url="http://10.0.0.1:8265", follow_redirects=False)
    answer = friend.get(f"{RUN}/episodes?filter=reward<1&token=secret")
    assert answer.status_code == 303
    assert answer.headers["location"] == f"{RUN}/episodes?filter=reward%3C1"
    assert "httponly" in answer.headers["set-cookie"].lower()
    assert friend.get(answer.headers["location"]).status_code == 200
    for path in ("//evil.example/", "/\\evil.example/", "///evil.example"):
        away = friend.get(f"http://10.0.0.1:8265{path}?token=secret").headers["location"]
        assert re.match(r"/[^/\\]", away)


def monstrous_episode() -> Episode:
    """Three thousand answers of a thousand characters, every tenth from the same beginning; odd messages among them."""
    odd = [
        {"role": "user", "content": {"huge": 10**40, "text": "\ud800"}},
        {"role": 7, "content": 3.5, "tool_calls": "no list"},
        {"role": "tool", "content": None, "tool_calls": [None, 5, {"function": "f"}, {"function": {"arguments": [1]}}]},
    ]
    answer = {"role": "assistant", "content": "a" * 1000}
    parents = [index - 1 if index % 10 else None for index in range(3000)]
    nodes = [Node(parent, True, [], answer, None, "stop", [], 0.0, 0.1) for parent in parents]
    nodes[0].messages.extend(odd)
    rows = [row_of([1, 2], [3, place % 7], first=place) for place in range(0, 3000, 10)]
    return Episode(rows, 0.0, odd, calls=3000, seconds=1.0, nodes=nodes)


def test_an_episode_of_any_size_and_shape_has_a_page(tmp_path: Path) -> None:
    run = tmp_path / "small" / "odd"
    run.mkdir(parents=True)
    with StoreWriter(run) as store:
        store.started(0, 0, {"answer": 10**40})
        store.ready(GroupResult(0, [monstrous_episode(), Episode([], 0.0)], [], {}))
    served = TestClient(Guarded(Viewer([tmp_path]).asgi()), base_url="http://127.0.0.1")
    page = served.get("/r/small.odd/episodes/1")
    assert page.status_code == 200
    assert len(page.content) < 6_000_000
    assert "1,003 more messages" in page.text
    for address in ("episodes/2", "groups/0", "episodes", "", "rejections", "episodes/1/0.txt"):
        assert served.get(f"/r/small.odd/{address}").status_code == 200


def test_a_damaged_store_is_told_and_the_others_are_shown(runs: Path, tmp_path: Path) -> None:
    broken = tmp_path / "small" / "broken"
    write_run(tmp_path / "small" / "good")
    broken.mkdir()
    (broken / STORE_FILE).write_bytes(b"no database" * 1000)
    served = TestClient(Guarded(Viewer([tmp_path]).asgi()), base_url="http://127.0.0.1")
    text = Seen(served.get("/").text).text
    assert "unreadable" in text
    assert "small/good" in text
    answer = served.get("/r/small.broken/episodes")
    assert answer.status_code == 500
    assert "cannot be read" in answer.text


def test_a_run_that_failed_says_with_which_error(tmp_path: Path) -> None:
    failed = write_run(tmp_path / "small" / "failed")
    (failed / "summary.json").unlink()
    with StoreWriter(failed) as store:
        store.event(FAILED, {"error": "ValueError: <no> such thing"})
    served = TestClient(Guarded(Viewer([tmp_path]).asgi()), base_url="http://127.0.0.1")
    assert "✕ failed" in Seen(served.get("/").text).text
    assert "It failed: ValueError: <no> such thing" in Seen(served.get("/r/small.failed/").text).text
    with StoreWriter(failed) as store:
        store.session(2, {"host": "here"})  # it is started again, and stopped
    assert "■ stopped" in Seen(served.get("/").text).text


def test_a_directory_of_one_run_is_that_run(runs: Path) -> None:
    served = TestClient(Guarded(Viewer([runs / "small" / "one"]).asgi()), base_url="http://127.0.0.1")
    assert "1 run" in served.get("/").text
    assert served.get(f"{RUN}/").status_code == 200


def test_names_of_directories_are_text_and_make_harmless_addresses(tmp_path: Path) -> None:
    write_run(tmp_path / "<b>ex" / "../odd name"[3:])
    viewer = Viewer([tmp_path])
    (slug,) = viewer.runs.find()
    assert re.fullmatch(r"[A-Za-z0-9._-]+", slug)
    served = TestClient(Guarded(viewer.asgi()), base_url="http://127.0.0.1")
    assert "<b>ex" not in served.get("/").text
    assert served.get(f"/r/{slug}/").status_code == 200


def test_elements_escape_their_text_and_their_attributes() -> None:
    assert (
        el("a", "<b>", title='"x" <y>', hidden=True, class_=None)
        == '<a title="&quot;x&quot; &lt;y&gt;" hidden>&lt;b&gt;</a>'
    )
    assert escape("a\x1b[31m") == "a␛[31m"
    assert visible("\u202eabc\ud800") == "⟨RLO⟩abc�"
