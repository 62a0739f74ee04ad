"""The pages about what another reward function would have said."""

from collections.abc import Sequence

from areal.utils.shorten import plural
from areal.viewer.frame import Links, RunTab, clock, facts, heading, number, page, signed
from areal.viewer.html import Child, Markup, el
from areal.viewer.rescoring import Rescored, RescoredEpisode
from areal.viewer.runs import Run

MOST_EPISODES = 200
MOST_GROUPS = 100
MOST_FAILURES = 20


def rescored_list_page(links: Links, run: Run, names: Sequence[str]) -> str:
    command = el("pre", el("code", f"areal rescore {run.directory} --reward my_module.my_reward"))
    listed: Child = (
        el("ul", [el("li", el("a", name, href=links.rescored(run.slug, name))) for name in names])
        if names
        else el("p", "Nothing was scored again yet.")
    )
    ask = el("p", "To see what another reward function would have said of this run's episodes:")
    place = RunTab(run.slug, run.name, "Re-scored")
    return page(links, f"Re-scored in {run.name}", heading("Re-scored"), listed, ask, command, place=place)


def rescored_page(links: Links, run: Run, found: Rescored) -> str:
    old, new = found.means()
    known = facts(
        ("reward function", el("code", found.reward_fn)),
        ("filter", el("code", found.filter) if found.filter else None),
        ("episodes", f"{len(found.episodes):,}"),
        ("mean reward", f"{number(old)} → {number(new)}"),
        ("changed", f"{found.changed:,}"),
        ("failed", f"{found.failures:,}" if found.failures else None),
        ("groups", f"{found.groups:,}"),
        ("advantages", f"baseline {found.baseline}, norm {found.norm}"),
        ("at", clock(found.at)),
    )
    turned = [
        each
        for each in found.episodes
        if each.new_advantage is not None and each.old_advantage * each.new_advantage < 0
    ]
    gained, lost = plural(len(found.gained), "group"), plural(len(found.lost), "group")
    sentence = (
        f"{gained} would gain a signal and {lost} would lose it; "
        f"the advantage of {plural(len(turned), 'episode')} would turn its sign."
    )
    changed = sorted(
        (each for each in found.episodes if each.new is not None and each.new != each.old),
        key=lambda each: -abs((each.new or 0.0) - each.old),
    )
    body = [
        heading(found.name),
        el("p", sentence, class_="verdict"),
        known,
        _groups(links, run, "Groups that would gain a signal", found.gained),
        _groups(links, run, "Groups that would lose it", found.lost),
        el("h2", "Rewards that change most"),
        _table(links, run, changed[:MOST_EPISODES]) if changed else el("p", "None changes."),
        _failures(links, run, [each for each in found.episodes if each.new is None]),
    ]
    place = RunTab(run.slug, run.name, "Re-scored")
    return page(links, f"{found.name} in {run.name}", *body, place=place)


def _groups(links: Links, run: Run, title: str, numbers: Sequence[int]) -> Child:
    if not numbers:
        return None
    shown = [links.to_group(run.slug, each) for each in numbers[:MOST_GROUPS]]
    more = len(numbers) - MOST_GROUPS
    listed: list[Child] = [part for link in shown for part in (" ", link)][1:]
    return [el("h2", title), el("p", listed, f" and {more:,} more" if more > 0 else None)]


def _table(links: Links, run: Run, episodes: Sequence[RescoredEpisode]) -> Markup:
    names = ("Episode", "Group", "Step", "Old", "New", "Change", "Advantage", "New advantage")
    rows = [
        el("tr", [el("td", cell) for cell in (
            links.to_episode(run.slug, each.id, str(each.id)),
            links.to_group(run.slug, each.group),
            number(each.step),
            number(each.old),
            number(each.new),
            signed((each.new or 0.0) - each.old),
            signed(each.old_advantage),
            signed(each.new_advantage),
        )])
        for each in episodes
    ]  # fmt: skip
    head = el("thead", el("tr", [el("th", name, scope="col") for name in names]))
    return el("div", el("table", head, el("tbody", rows), class_="numbers"), class_="wide")


def _failures(links: Links, run: Run, failed: Sequence[RescoredEpisode]) -> Child:
    if not failed:
        return None
    shown = [
        el("li", links.to_episode(run.slug, each.id, str(each.id)), " ", each.failure)
        for each in failed[:MOST_FAILURES]
    ]
    return [el("h2", f"The function failed for {plural(len(failed), 'episode')}"), el("ul", shown)]
