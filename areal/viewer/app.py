"""The HTTP app: which address shows what. It reads stores and changes nothing.

Each request opens the store that it asks for and closes it again, in a thread: a page is of one moment, and a run that
goes on is not held up. Addresses name runs by the names that `Runs` made, never by paths.
"""

import functools
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.routing import Route

from areal.api.errors import ArealError
from areal.store.filters import FilterError, parse_filter
from areal.store.search import PAGE, StoreSearch
from areal.store.search import Place as PagePlace
from areal.trainer.run_state import report_of
from areal.trainer.status import Report
from areal.utils.shorten import first_line
from areal.viewer import run_pages
from areal.viewer.episode_pages import episodes_page, group_page, rows_of
from areal.viewer.frame import ASSETS, Links, heading, page
from areal.viewer.html import el
from areal.viewer.rescored_pages import rescored_list_page, rescored_page
from areal.viewer.rescoring import find_rescored, read_rescored
from areal.viewer.runs import Run, Runs
from areal.viewer.tokens import TokenTexts, load_texts, run_config
from areal.viewer.trajectory_page import load_trajectory, message_texts, trajectory_page

STATIC = Path(__file__).with_name(ASSETS)
TYPES = {".js": "text/javascript", ".css": "text/css", ".LICENSE": "text/plain"}
MOST_ROWS = 1000
MOST_COMPARED = 12
LARGEST_ID = 2**62
"""Numbers beyond it are nobody's, and SQLite would not take them."""
TOKENIZERS = 4
"""That are held in memory."""


class Viewer:
    def __init__(self, places: list[Path]) -> None:
        self.runs = Runs(places)
        self._links = Links()
        self._texts = functools.lru_cache(TOKENIZERS)(self._load_texts)

    def asgi(self) -> Starlette:
        routes: list[tuple[str, Callable[[Request], Response]]] = [
            ("/", self._runs),
            ("/compare", self._compare),
            ("/static/{name}", static_file),
            ("/r/{run}/", self._run),
            ("/r/{run}/live", self._live),
            ("/r/{run}/figures.json", self._figures),
            ("/r/{run}/episodes", self._episodes),
            ("/r/{run}/episodes.json", self._episode_rows),
            ("/r/{run}/histogram.json", self._histogram),
            ("/r/{run}/episodes/{number}", self._episode),
            ("/r/{run}/episodes/{number}/{place}.txt", self._message),
            ("/r/{run}/groups/{number}", self._group),
            ("/r/{run}/rejections", self._rejections),
            ("/r/{run}/rescored", self._rescored_list),
            ("/r/{run}/rescored/{name}", self._rescored),
        ]
        made = [Route(path, _guarded(endpoint), methods=["GET"]) for path, endpoint in routes]
        app = Starlette(routes=made, exception_handlers={HTTPException: as_page})
        app.router.redirect_slashes = False
        return app

    def _runs(self, request: Request) -> Response:
        return _html(run_pages.runs_page(self._links, [self.runs.facts(run) for run in self.runs.find().values()]))

    def _compare(self, request: Request) -> Response:
        found = self.runs.find()
        chosen = []
        for slug in list(dict.fromkeys(request.query_params.getlist("run")))[:MOST_COMPARED]:
            run = found.get(slug)
            if run is None:
                raise _no_run(slug)
            with run.search() as store:
                chosen.append((self.runs.facts(run), run_pages.chart_data(store)))
        return _html(run_pages.compare_page(self._links, chosen))

    def _run(self, request: Request) -> Response:
        run = self._found(request)
        facts = self.runs.facts(run)
        report = _report(run) if facts.state == "running" else None
        with run.search() as store:
            return _html(run_pages.run_page(self._links, facts, store, report))

    def _live(self, request: Request) -> Response:
        """What the run does now, as a piece of its page."""
        run = self._found(request)
        with run.search() as store:
            states = store.states()
        facts = self.runs.facts(run)
        strip = run_pages.live_strip(_report(run) if facts.state == "running" else None, states)
        return _html(strip, {"x-run-state": facts.state, "x-run-step": str(facts.step)})

    def _figures(self, request: Request) -> Response:
        """What the charts of a running run draw, once it has gone on."""
        run = self._found(request)
        with run.search() as store:
            return _json({**run_pages.chart_data(store), "verdict": self.runs.facts(run).verdict})

    def _episodes(self, request: Request) -> Response:
        run, query = self._found(request), request.query_params
        with run.search() as store:
            made = episodes_page(self._links, run, store, query.get("filter", ""), query.get("order") or "-id")
        return _html(made)

    def _episode_rows(self, request: Request) -> Response:
        run, query = self._found(request), request.query_params
        try:
            chosen = parse_filter(query.get("filter", ""))
            with run.search() as store:
                found = store.page(
                    chosen, query.get("order") or "-id", _after(query.get("after")), _limit(query.get("limit"))
                )
                known: dict[str, Any] = {"rows": rows_of(found.episodes), "next": found.next}
                if "after" not in query:
                    known["count"] = store.count(chosen)
        except FilterError as error:
            return _json({"error": str(error)}, 400)
        return _json(known)

    def _histogram(self, request: Request) -> Response:
        run, query = self._found(request), request.query_params
        try:
            with run.search() as store:
                found = store.histogram(query.get("column", ""), parse_filter(query.get("filter", "")))
        except FilterError as error:
            return _json({"error": str(error)}, 400)
        return _json({"edges": found.edges, "counts": found.counts, "unknown": found.unknown})

    def _episode(self, request: Request) -> Response:
        run, number = self._found(request), _number(request, "number")
        with run.search() as store:
            found = load_trajectory(store, number)
            if found is None:
                raise _nothing(f"there is no episode {number} in this run; it may have been tried again since")
            texts = self._texts_of(run, store)
        first = _whole(request.query_params.get("first") or "0")
        return _html(trajectory_page(self._links, run, found, texts, first))

    def _message(self, request: Request) -> Response:
        run, number, place = self._found(request), _number(request, "number"), _number(request, "place")
        with run.search() as store:
            found = load_trajectory(store, number)
        texts = [] if found is None else message_texts(found.episode)
        if place >= len(texts):
            raise _nothing(f"there is no message {place} of an episode {number} in this run")
        return PlainTextResponse(texts[place], headers={"cache-control": "no-store"})

    def _group(self, request: Request) -> Response:
        run, number = self._found(request), _number(request, "number")
        with run.search() as store:
            group = store.group(number)
            if group is None:
                raise _nothing(f"there is no group {number} in this run")
            return _html(group_page(self._links, run, store, group))

    def _rejections(self, request: Request) -> Response:
        run = self._found(request)
        with run.search() as store:
            return _html(run_pages.rejections_page(self._links, run, store.rejection_kinds()))

    def _rescored_list(self, request: Request) -> Response:
        run = self._found(request)
        return _html(rescored_list_page(self._links, run, find_rescored(run.directory)))

    def _rescored(self, request: Request) -> Response:
        run, name = self._found(request), request.path_params["name"]
        if name not in find_rescored(run.directory):
            raise _nothing("nothing was re-scored under that name in this run")
        return _html(rescored_page(self._links, run, read_rescored(run.directory, name)))

    def _found(self, request: Request) -> Run:
        slug = request.path_params["run"]
        run = self.runs.find().get(slug)
        if run is None:
            raise _no_run(slug)
        return run

    def _texts_of(self, run: Run, store: StoreSearch) -> TokenTexts:
        config = run_config(store)
        named = {
            "tokenizer_path": config.get("tokenizer_path"),
            "actor": {"path": (config.get("actor") or {}).get("path")},
        }
        return self._texts(run.directory, orjson.dumps(named))

    def _load_texts(self, directory: Path, config: bytes) -> TokenTexts:
        return load_texts(directory, orjson.loads(config))


def _report(run: Run) -> Report:
    try:
        return report_of(run.directory)
    except ArealError as error:  # somebody else's run
        return {"run": str(run.directory), "state": "silent", "text": str(error)}


def _guarded(endpoint: Callable[[Request], Response]) -> Callable[[Request], Response]:
    """The endpoint, with what a store cannot tell as a page."""

    @functools.wraps(endpoint)
    def answer(request: Request) -> Response:
        try:
            return endpoint(request)
        except ArealError as error:
            raise HTTPException(500, first_line(error)) from error

    return answer


def as_page(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    text = str(error.detail)
    return HTMLResponse(page(Links(), "Not shown", heading("Not shown"), el("p", text)), error.status_code)


def static_file(request: Request) -> Response:
    path = next((each for each in STATIC.iterdir() if each.name == request.path_params["name"]), None)
    if path is None:
        raise _nothing("there is no such file")
    content = path.read_bytes()
    mark = f'"{hashlib.blake2b(content, digest_size=8).hexdigest()}"'
    headers = {"etag": mark, "cache-control": "no-cache"}
    if request.headers.get("if-none-match") == mark:
        return Response(status_code=304, headers=headers)
    return Response(content, media_type=TYPES.get(path.suffix, "application/octet-stream"), headers=headers)


def _html(text: str, headers: dict[str, str] | None = None) -> Response:
    return HTMLResponse(text, headers={"cache-control": "no-store", **(headers or {})})


def _json(value: Any, status: int = 200) -> Response:
    return Response(orjson.dumps(value), status, {"cache-control": "no-store"}, "application/json")


def _number(request: Request, name: str) -> int:
    return _whole(request.path_params[name])


def _whole(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text[:20]) < LARGEST_ID and len(text) < 20):
        raise _nothing("a number is needed in this address")
    return int(text)


def _after(text: str | None) -> PagePlace | None:
    """Where the page before ended, as that page said."""
    if not text:
        return None
    try:
        value, number = orjson.loads(text)
    except (ValueError, TypeError):
        raise HTTPException(400, "`after` is what the page before gave for `next`") from None
    if type(number) is not int or not (value is None or type(value) in (int, float)):
        raise HTTPException(400, "`after` is what the page before gave for `next`")
    return value, number


def _limit(text: str | None) -> int:
    return PAGE if not text else max(1, min(_whole(text), MOST_ROWS))


def _no_run(slug: str) -> HTTPException:
    return _nothing("there is no such run here")


def _nothing(why: str) -> HTTPException:
    return HTTPException(404, why)
