"""How fast does the viewer show 100,000 episodes, in how much memory, and what does a run pay for being watched?

The viewer runs as `areal view` does, in a process of its own, on a generated store. Pages are asked for over HTTP, and
opened in Chromium if Playwright and /usr/bin/chromium are here. Being watched is measured in processor time: that of
the viewer's process while an open page of a run that trains asks as often as it does, as a share of the machine.
"""

import argparse
import gzip
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx

from areal.viewer.app import STATIC
from benchmarks.report import Aim, main
from benchmarks.store import EPISODES, PHRASE, write

CHROMIUM = Path("/usr/bin/chromium")
CLOSED = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-background-networking",
          "--disable-component-update", "--disable-sync", "--no-first-run"]  # fmt: skip
REPEATS = 7
SECONDS = 60.0
TRAIN_STEPS = 60
ASKS_EVERY = 3.0
"""Seconds between two looks of an open page at a run that trains (static/live.js)."""
FILTERS = {
    "nothing": "",
    "three ways": "reward<0.5 tokens>60 step:100-300",
    "a phrase": f'"{PHRASE}"',
    "a common word": '"the"',
    "a common word and figures": 'reward>1 seconds>5 "the"',
    "one reason": "reason:stale",
}
RUN = "/r/generated.many"
PAINT = "performance.getEntriesByName('first-contentful-paint')[0].startTime"


@contextmanager
def serving(place: Path) -> Iterator[tuple[str, int]]:
    """The viewer's address and its process."""
    words = [sys.executable, "-m", "areal.cli.main", "view", str(place), "--port", "0"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            found = re.search(r"http://\S+", process.stdout.readline())
            assert found is not None, "the viewer did not start"
            yield found[0].rstrip("/"), process.pid
        finally:
            process.terminate()
            process.wait(SECONDS)


def fastest(ask: Callable[[], object]) -> float:
    """In milliseconds; other processes slow single ones down."""
    taken = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        ask()
        taken.append(time.perf_counter() - began)
    return 1000 * min(taken)


def request_milliseconds(client: httpx.Client) -> dict[str, float]:
    def get(path: str, **query: str) -> None:
        client.get(f"{RUN}{path}", params=query).raise_for_status()

    asked: dict[str, Callable[[], None]] = {
        "list of runs": lambda: client.get("/").raise_for_status() and None,
        "run": partial(get, "/"),
        "episodes": partial(get, "/episodes"),
        "trajectory": partial(get, "/episodes/50000"),
        "group": partial(get, "/groups/6000"),
        "rejections": partial(get, "/rejections"),
    }
    asked |= {f"filter: {name}": partial(get, "/episodes.json", filter=words) for name, words in FILTERS.items()}
    asked |= {
        f"histogram: {name}": partial(get, "/histogram.json", filter=words, column="seconds")
        for name, words in FILTERS.items()
    }
    return {name: fastest(ask) for name, ask in asked.items()}


def first_paint_milliseconds(address: str) -> dict[str, float]:
    """Empty if there is no browser here."""
    if find_spec("playwright") is None or not CHROMIUM.exists():
        print("first paint is not measured: playwright or chromium is missing", file=sys.stderr)
        return {}
    from playwright.sync_api import sync_playwright

    paths = {
        "list of runs": "/",
        "run": f"{RUN}/",
        "episodes": f"{RUN}/episodes",
        "trajectory": f"{RUN}/episodes/50000",
    }
    found: dict[str, float] = {}
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=CLOSED)
        page = browser.new_page(viewport={"width": 1280, "height": 850})
        for name, path in paths.items():
            taken = []
            for _ in range(REPEATS):
                page.goto(address + path)
                page.wait_for_function(f"() => {PAINT.replace('[0].startTime', '.length')}", timeout=1000 * SECONDS)
                taken.append(page.evaluate(PAINT))
            found[name] = min(taken)
        browser.close()
    return found


def peak_megabytes(pid: int) -> float:
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) / 1000


def processor_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def script_kilobytes() -> float:
    """All scripts and styles as a server would compress them."""
    return (
        sum(len(gzip.compress(path.read_bytes())) for path in STATIC.iterdir() if path.suffix in (".js", ".css")) / 1000
    )


def watched_run(directory: Path) -> dict[str, float]:
    """Train the example while a page of it is open; what the viewer computes meanwhile."""
    settings = [
        f"total_train_steps={TRAIN_STEPS}",
        "valid_dataset.size=32",
        "trial_name=one",
        f"output_dir={directory}",
    ]
    config = ["--config", "examples/agent_workflow/config.yaml", *settings]
    words = [sys.executable, "-m", "areal.cli.main", "train", *config]
    log = (directory / "train.log").open("w")
    with serving(directory) as (address, viewer), subprocess.Popen(words, stdout=log, stderr=log) as process:
        client = httpx.Client(base_url=address, trust_env=False, timeout=SECONDS)
        run, looks, began = "/r/sort-digits.one", 0, None
        try:
            while process.poll() is None:
                if began is None and (directory / "sort-digits" / "one" / "metrics.jsonl").exists():
                    client.get(f"{run}/").raise_for_status()
                    began, before = time.monotonic(), processor_seconds(viewer)
                elif began is not None:
                    for path in ("live", "figures.json"):
                        client.get(f"{run}/{path}").raise_for_status()
                    looks += 1
                time.sleep(ASKS_EVERY)
            assert began is not None, "the run took no step"
            seconds, computed = time.monotonic() - began, processor_seconds(viewer) - before
        finally:
            process.terminate()
            process.wait(SECONDS)
    share = 100 * computed / seconds / (os.cpu_count() or 1)
    return {"seconds": seconds, "looks": looks, "viewer_cpu_seconds": computed, "percent_of_machine": share}


def run(episodes: int, store: Path | None) -> tuple[dict[str, Any], list[Aim]]:
    figures: dict[str, Any] = {"episodes": episodes, "script_kilobytes": script_kilobytes()}
    with tempfile.TemporaryDirectory() as name:
        place = store or Path(name) / "generated" / "many"
        if store is None:
            place.mkdir(parents=True)
            write(place, episodes)
        with serving(place) as (address, pid):
            figures["first_paint_ms"] = first_paint_milliseconds(address)
            with httpx.Client(base_url=address, trust_env=False, timeout=SECONDS) as client:
                figures["request_ms"] = request_milliseconds(client)
            figures["peak_megabytes"] = peak_megabytes(pid)
        (Path(name) / "live").mkdir()
        figures["watched"] = watched_run(Path(name) / "live")
    figures["median_filter_ms"] = statistics.median(
        taken for name, taken in figures["request_ms"].items() if name.startswith("filter")
    )
    print(json.dumps(figures, indent=2), file=sys.stderr)
    return figures, aims(figures)


def aims(figures: dict[str, Any]) -> list[Aim]:
    asked = figures["request_ms"]
    painted = figures["first_paint_ms"]
    slowest = max(taken for name, taken in asked.items() if name.startswith("filter"))
    return [
        *([Aim.at_most("first paint of any page, ms", max(painted.values()), 300.0)] if painted else []),
        Aim.at_most("rows and count of any filter, ms", slowest, 200.0),
        Aim.at_most("memory of the viewer, MB", figures["peak_megabytes"], 150.0),
        Aim.at_most("scripts and styles, compressed, kB", figures["script_kilobytes"], 150.0),
        Aim.at_most(
            "processor time for being watched, % of the machine", figures["watched"]["percent_of_machine"], 2.0
        ),
    ]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--episodes", type=int, default=EPISODES, help=f"in the store that is made ({EPISODES})")
    parser.add_argument(
        "--store", type=Path, metavar="DIR", help="a store that benchmarks.store wrote, instead of a new one"
    )
    options, _ = parser.parse_known_args()
    main(__doc__ or "", partial(run, options.episodes, options.store), parser)
