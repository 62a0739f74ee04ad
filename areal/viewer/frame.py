"""What all pages have in common: the frame around them, the links between them, and how figures are written.

The same pages are served and written as files. `Links` knows which: served ones have addresses from the root, files
have names relative to the page.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import quote, urlencode

from areal.utils.shorten import duration
from areal.viewer.html import Child, Markup, el

ASSETS = "static"
UNKNOWN = "–"


@dataclass(frozen=True)
class Links:
    base: str = "/"
    """How a page gets to the root: `/` if it is served, else as many `../` as it is deep."""
    written: "Written | None" = None
    """Of files: what has a page; None = everything has."""

    @property
    def is_file(self) -> bool:
        return self.base != "/"

    def asset(self, name: str) -> str:
        return f"{self.base}{ASSETS}/{name}"

    def home(self) -> str:
        return self._page("", "index")

    def compare(self, slugs: Sequence[str] = ()) -> str:
        return self._page("", "compare", [("run", slug) for slug in slugs])

    def run(self, slug: str) -> str:
        return self._page(f"r/{quote(slug)}/", "index")

    def episodes(self, slug: str, words: str = "") -> str:
        return self._page(f"r/{quote(slug)}/", "episodes", [("filter", words)] if words else [])

    def episode(self, slug: str, number: int | str) -> str:
        return self._page(f"r/{quote(slug)}/episodes/", str(number))

    def to_episode(self, slug: str, number: int, text: str) -> Child:
        """A link, or the text alone if the episode has no page."""
        has_page = self.written is None or number in self.written.episodes
        return el("a", text, href=self.episode(slug, number)) if has_page else text

    def to_group(self, slug: str, number: int) -> Child:
        has_page = self.written is None or number in self.written.groups
        return el("a", str(number), href=self.group(slug, number)) if has_page else str(number)

    def message(self, slug: str, number: int, place: int) -> str:
        return f"{self.base}r/{quote(slug)}/episodes/{number}/{place}.txt"

    def to_step(self, slug: str, step: int | None) -> Child:
        return None if step is None else el("a", str(step), href=self.episodes(slug, f"step:{step}"))

    def group(self, slug: str, number: int | str) -> str:
        return self._page(f"r/{quote(slug)}/groups/", str(number))

    def rejections(self, slug: str) -> str:
        return self._page(f"r/{quote(slug)}/", "rejections")

    def rescored(self, slug: str, name: str = "") -> str:
        place = f"r/{quote(slug)}/"
        return self._page(f"{place}rescored/", quote(name)) if name else self._page(place, "rescored")

    def data(self, slug: str, name: str) -> str:
        """What a script asks for while the page is open; empty = nothing answers."""
        return "" if self.is_file else f"/r/{quote(slug)}/{name}"

    def _page(self, place: str, name: str, query: Sequence[tuple[str, str]] = ()) -> str:
        words = f"?{urlencode(query)}" if query else ""
        if self.is_file:
            return f"{self.base}{place}{name}.html{words}"
        return f"/{place}{'' if name == 'index' else name}{words}"


@dataclass(frozen=True)
class Written:
    """The episodes and groups of a run that have a page."""

    episodes: frozenset[int]
    groups: frozenset[int]


@dataclass(frozen=True)
class RunTab:
    """Where a page is: the run that it belongs to, and which of that run's tabs."""

    slug: str
    name: str
    tab: str


TABS = ("Run", "Episodes", "Rejections", "Re-scored")


def page(links: Links, title: str, *body: Child, place: RunTab | None = None, scripts: Sequence[str] = ()) -> str:
    """A whole page. `scripts` are files of static/, which run when the page is there."""
    head = el(
        "head",
        el("meta", charset="utf-8"),
        el("meta", name="viewport", content="width=device-width, initial-scale=1"),
        el("meta", name="color-scheme", content="light dark"),
        el("title", f"{title} · areal" if title != "areal" else title),
        el("link", rel="icon", href="data:,"),
        el("link", rel="stylesheet", href=links.asset("viewer.css")),
        el("link", rel="stylesheet", href=links.asset("uplot.css")) if "uplot.js" in scripts else None,
        el("script", src=links.asset("theme.js")),
        [el("script", src=links.asset(name), defer=True) for name in scripts],
    )
    skip = el("a", "Skip to the content", class_="skip", href="#content")
    main = el("main", *body, id="content", tabindex="-1")
    return f"<!doctype html>\n{el('html', head, el('body', skip, _header(links, place), main), lang='en')}\n"


def _header(links: Links, place: RunTab | None) -> Markup:
    way = [el("a", "areal", href=links.home(), class_="wordmark")]
    if place is not None:
        way.append(el("a", place.name, href=links.run(place.slug), class_="run-name"))
    switch = el("button", "Theme: auto", type="button", id="theme")
    return el("header", el("div", way, switch, class_="way"), _tabs(links, place), class_="top")


def _tabs(links: Links, place: RunTab | None) -> Markup | None:
    if place is None:
        return None
    targets = [
        links.run(place.slug),
        links.episodes(place.slug),
        links.rejections(place.slug),
        links.rescored(place.slug),
    ]
    made = [
        el("a", name, href=target, aria_current="page" if name == place.tab else None)
        for name, target in zip(TABS, targets, strict=True)
    ]
    return el("nav", made, aria_label="Pages of the run")


def heading(title: Child, note: Child = None) -> Markup:
    return el("div", el("h1", title), el("p", note, class_="note") if note else None, class_="heading")


def facts(*pairs: tuple[str, Child]) -> Markup:
    """Names and values in a row; those without a value are left out."""
    shown = [
        el("div", el("dt", name), el("dd", value)) for name, value in pairs if value is not None and value != UNKNOWN
    ]
    return el("dl", shown, class_="facts")


def state_badge(state: str) -> Markup:
    mark = {
        "running": "▶",
        "finished": "✓",
        "stopped": "■",
        "killed": "✕",
        "failed": "✕",
        "unreadable": "!",
        "trained": "✓",
    }
    mark |= {"rejected": "✕", "ready": "…", "retry": "↻", "silent": "?"}
    return el("span", el("span", mark.get(state, "·"), aria_hidden="true"), f" {state}", class_=f"badge state-{state}")


def number(value: float | None, digits: int = 3) -> str:
    """As short as it stays recognisable."""
    if value is None or not math.isfinite(value):
        return UNKNOWN
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:.{digits}g}"


def signed(value: float | None, digits: int = 3) -> str:
    if value is None or not math.isfinite(value):
        return UNKNOWN
    return "0" if value == 0 else f"{value:+.{digits}g}".replace("-", "−")


def seconds(value: float | None) -> str:
    if value is None:
        return UNKNOWN
    return f"{value:.2f} s" if value < 10 else duration(value)


def clock(at: float | None) -> str:
    return UNKNOWN if at is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(at))


def sparkline(values: Sequence[float], width: int = 120, height: int = 28) -> Markup | None:
    """The shape of a curve; its numbers are beside it."""
    if len(values) < 2:
        return None
    every = max(1, len(values) // width)
    means = [sum(part) / len(part) for part in (values[i : i + every] for i in range(0, len(values), every))]
    low, high = min(means), max(means)
    across, up = (width - 2) / max(1, len(means) - 1), (height - 4) / ((high - low) or 1.0)
    points = " ".join(f"{1 + i * across:.1f},{height - 2 - (v - low) * up:.1f}" for i, v in enumerate(means))
    label = f"reward from {values[0]:.3g} to {values[-1]:.3g}, between {min(values):.3g} and {max(values):.3g}"
    line = el("polyline", points=points)
    box = f"0 0 {width} {height}"
    return el("svg", line, class_="spark", viewBox=box, width=width, height=height, role="img", aria_label=label)


def bar(value: float, most: float, label: str, width: int = 160) -> Markup:
    """A bar from the middle: to the right if the value is above 0, to the left below."""
    half = width / 2
    length = min(half, half * abs(value) / most) if most else 0.0
    start = half if value >= 0 else half - length
    shape = el("rect", x=f"{start:.1f}", y=2, width=f"{length:.1f}", height=10, class_="up" if value >= 0 else "down")
    middle = el("line", x1=half, x2=half, y1=0, y2=14, class_="axis")
    return el("svg", shape, middle, class_="bar", viewBox=f"0 0 {width} 14", width=width, height=14, role="img",
              aria_label=label)  # fmt: skip
