"""The viewer's pages as files that a browser opens from a disk: `areal view RUNS --bundle DIR`.

A page has its data inside, because a page on a disk may not ask for other files. Not every episode has a page: those
that the filter finds, the newest first, up to a number.
"""

import shutil
from pathlib import Path

from areal.api.errors import ArealError
from areal.store.filters import EpisodeFilter
from areal.store.search import EpisodeLine, StoreSearch
from areal.viewer import run_pages
from areal.viewer.app import STATIC
from areal.viewer.episode_pages import episodes_page, group_page
from areal.viewer.frame import ASSETS, Links, Written
from areal.viewer.rescored_pages import rescored_list_page, rescored_page
from areal.viewer.rescoring import find_rescored, read_rescored
from areal.viewer.runs import Run, Runs
from areal.viewer.tokens import load_texts, run_config
from areal.viewer.trajectory_page import ENOUGH, FOLDED, LONGEST, load_trajectory, message_texts, trajectory_page

MARK = "areal-view"
"""A file that tells a bundle from other directories, which are not overwritten."""


def write_bundle(runs: Runs, target: Path, chosen: EpisodeFilter, most_episodes: int) -> int:
    """Returns how many pages were written."""
    if target.exists() and not target.is_dir():
        raise ArealError(f"a bundle is a new directory, but {target} is a file; choose another")
    if target.exists() and any(target.iterdir()) and not (target / MARK).exists():
        raise ArealError(f"a bundle is a new directory, but {target} has other files; choose another")
    found = [runs.facts(run) for run in runs.find().values()]
    readable = [facts for facts in found if facts.state != "unreadable"]
    if not readable:
        why = "; ".join(f"{facts.run.directory}: {facts.verdict}" for facts in found)
        said = f"found none ({why})" if why else "found none"
        raise ArealError(f"a bundle needs a run that can be read, {said}; give a run's directory")
    shutil.rmtree(target, ignore_errors=True)
    pages = _Pages(target)
    (target / ASSETS).mkdir(parents=True)
    (target / MARK).touch()  # first, so that what a full disk has cut short can be written again
    for each in STATIC.iterdir():
        shutil.copyfile(each, target / ASSETS / each.name)
    pages.write("index.html", run_pages.runs_page(Links("./"), found))
    compared = []
    for facts in readable:
        with facts.run.search() as store:
            lines = _lines(store, chosen, most_episodes)
            links = Links(
                "../../", Written(frozenset(line.id for line in lines), frozenset(line.task_id for line in lines))
            )
            place = f"r/{facts.run.slug}"
            pages.write(f"{place}/index.html", run_pages.run_page(links, facts, store, None))
            _write_run(pages, links, facts.run, store, lines)
            compared.append((facts, run_pages.chart_data(store)))
    pages.write("compare.html", run_pages.compare_page(Links("./"), compared))
    return pages.count


class _Pages:
    def __init__(self, target: Path) -> None:
        self._target = target
        self.count = 0

    def write(self, name: str, text: str) -> None:
        path = self._target / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        self.count += 1


def _lines(store: StoreSearch, chosen: EpisodeFilter, most: int) -> list[EpisodeLine]:
    found: list[EpisodeLine] = []
    place, more = None, True
    while more and len(found) < most:
        page = store.page(chosen, "-id", place, most - len(found))
        found += page.episodes
        place, more = page.next, page.next is not None
    return found


def _write_run(pages: _Pages, links: Links, run: Run, store: StoreSearch, lines: list[EpisodeLine]) -> None:
    place = f"r/{run.slug}"
    deeper = Links("../../../", links.written)
    pages.write(f"{place}/episodes.html", episodes_page(links, run, store, "", "-id", lines))
    pages.write(f"{place}/rejections.html", run_pages.rejections_page(links, run, store.rejection_kinds()))
    names = find_rescored(run.directory)
    pages.write(f"{place}/rescored.html", rescored_list_page(links, run, names))
    for name in names:
        pages.write(f"{place}/rescored/{name}.html", rescored_page(deeper, run, read_rescored(run.directory, name)))
    for task_id in dict.fromkeys(line.task_id for line in lines):
        group = store.group(task_id)
        if group is not None:
            pages.write(f"{place}/groups/{task_id}.html", group_page(deeper, run, store, group))
    texts = load_texts(run.directory, run_config(store))
    for line in lines:
        found = load_trajectory(store, line.id)
        if found is None:  # its group was tried again since
            continue
        pages.write(f"{place}/episodes/{line.id}.html", trajectory_page(deeper, run, found, texts))
        texts_said = message_texts(found.episode)
        whole = FOLDED if sum(map(len, texts_said)) > ENOUGH else LONGEST
        for number, text in enumerate(texts_said):
            if len(text) > whole:
                pages.write(f"{place}/episodes/{line.id}/{number}.txt", text)
