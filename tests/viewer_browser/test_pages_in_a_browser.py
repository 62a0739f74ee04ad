"""Every page in a browser: nothing goes wrong, nobody is kept out, it fits, and keys and clicks do what they say."""

from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from areal.store.filters import parse_filter
from areal.store.search import StoreSearch
from tests.viewer_browser.conftest import KEPT, TRAIN_SECONDS, Watched, serious

pytestmark = pytest.mark.timeout(TRAIN_SECONDS)
"""The first that asks for a run, or for many episodes, waits until they are made."""

REAL = "/r/tool-use.one"
PAGES = {
    "runs": "/",
    "compare": "/compare?run=tool-use.one&run=tool-use.two",
    "run": f"{REAL}/",
    "episodes": f"{REAL}/episodes?filter=reward<1",
    "trajectory": f"{REAL}/episodes/5",
    "tokens": f"{REAL}/episodes/5#tokens",
    "group": f"{REAL}/groups/3",
    "rescored": f"{REAL}/rescored",
}
SMALL = {
    "rejections": "/r/small.one/rejections",
    "tree": "/r/small.one/episodes/3",
    "no-signal": "/r/small.one/groups/0",
    "hostile": "/r/small.one/groups/3",
    "wrong-filter": "/r/small.one/episodes?filter=rewrd<1",
}
WINDOWS = {"light": ("light", 1280), "dark": ("dark", 1280), "narrow": ("light", 400)}


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("name", [*PAGES, *SMALL])
def test_a_page_fits_works_and_is_open_to_everybody(
    browser: Browser, real: str, small: str, axe: str, name: str, window: str
) -> None:
    scheme, width = WINDOWS[window]
    address = real + PAGES[name] if name in PAGES else small + SMALL[name]
    context = browser.new_context(viewport={"width": width, "height": 850}, color_scheme=scheme, bypass_csp=True)  # type: ignore[arg-type]
    watched = Watched(context.new_page())
    page = watched.page
    page.goto(address, wait_until="networkidle")
    shots = KEPT / "screenshots"
    shots.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=shots / f"{name}-{window}.png", full_page=True)
    beyond = page.evaluate("document.documentElement.scrollWidth - innerWidth")
    found = serious(page, axe)
    context.close()
    assert watched.wrong == []
    assert beyond <= 0, f"{beyond} pixels are beyond the window"
    assert found == []


def test_a_line_filters_completes_and_says_what_is_wrong(watched: Watched, small: str) -> None:
    page = watched.page
    page.goto(f"{small}/r/small.one/episodes")
    page.keyboard.press("/")
    page.keyboard.type("rew")
    expect(page.get_by_role("option", name="reward")).to_be_visible()
    page.keyboard.press("Tab")
    page.keyboard.type("1")
    expect(page.locator("#count")).to_have_text("10 episodes")
    page.keyboard.type(" state:tr")
    page.keyboard.press("Tab")
    expect(page.locator("#filter")).to_have_value("reward<1 state:trained")
    expect(page.locator("#count")).to_have_text("9 episodes")
    page.keyboard.type(" nonsense")
    expect(page.locator("#filter-error")).to_contain_text("is no filter")
    watched.wrong.clear()  # the browser tells of the answer 400


def test_keys_move_through_the_table_and_open_an_episode(watched: Watched, small: str) -> None:
    page = watched.page
    page.goto(f"{small}/r/small.one/episodes?order=id")
    for key in "jjjk":
        page.keyboard.press(key)
    expect(page.locator("tr[aria-selected=true] td").first).to_have_text("2")
    page.keyboard.press("Enter")
    page.wait_for_url("**/episodes/2")
    page.keyboard.press("j")
    page.wait_for_url("**/episodes/3")
    expect(page.locator(".reading")).to_contain_text("3 of 13")
    page.keyboard.press("k")
    page.wait_for_url("**/episodes/2")
    page.keyboard.press("u")
    page.wait_for_url("**/episodes?order=id")


def test_a_brush_over_a_histogram_filters(watched: Watched, small: str) -> None:
    page = watched.page
    page.goto(f"{small}/r/small.one/episodes")
    box = page.locator(".histogram svg").first.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] * 0.9, box["y"] + 10)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.99, box["y"] + 10)
    page.mouse.up()
    expect(page.locator("#filter")).to_have_value("reward:0.9..1")
    expect(page.locator("#count")).to_have_text("3 episodes")


def test_a_click_or_a_key_on_a_chart_opens_the_episodes_of_its_step(watched: Watched, real: str) -> None:
    page = watched.page
    page.goto(f"{real}{REAL}/")
    chart = page.locator(".chart").nth(1)
    chart.focus()
    for key in ("ArrowRight", "ArrowRight", "Enter"):
        page.keyboard.press(key)
    page.wait_for_url("**/episodes?filter=step%3A2")
    page.go_back()
    page.locator(".chart .u-over").first.click()
    page.wait_for_url("**/episodes?filter=step%3A*")
    expect(page.locator("#count")).to_have_text("128 episodes")


def test_the_crosshair_is_on_all_charts_at_once(watched: Watched, real: str) -> None:
    page = watched.page
    page.goto(f"{real}{REAL}/")
    page.locator(".chart .u-over").first.hover()
    steps = page.locator(".chart .u-legend .u-series:first-child .u-value").all_text_contents()
    assert len(steps) >= 5
    assert len(set(steps)) == 1
    assert steps[0] != "–"


def test_tokens_tell_their_numbers_to_pointer_and_keyboard(watched: Watched, real: str) -> None:
    page = watched.page
    page.goto(f"{real}{REAL}/episodes/5")
    page.get_by_role("tab", name="Tokens").click()
    page.locator("#token-rows .tk.sampled").nth(2).hover()
    facts = page.locator("#token-facts")
    expect(facts).to_contain_text("log-prob")
    before = facts.inner_text()
    page.locator("#token-rows .tk.sampled").first.focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    expect(facts).to_have_text(before, use_inner_text=True)
    for colour in ("ratio", "advantage", "version", "logprob"):
        page.locator("#colour").select_option(colour)
        assert page.locator("#legend .tk").count() >= 1
    page.locator("#token-rows button").first.click()
    expect(page.locator("#token-rows")).to_contain_text("Tools:")


def test_runs_are_ticked_and_compared(watched: Watched, real: str) -> None:
    page = watched.page
    page.goto(real)
    compare = page.get_by_role("button", name="Compare the ticked runs")
    expect(compare).to_be_disabled()
    for tick in page.get_by_role("checkbox").all():
        tick.check()
    compare.click()
    page.wait_for_url("**/compare?run=*")
    expect(page.locator(".chart").first).to_contain_text("tool-use/two")


def test_the_theme_is_switched_and_kept(watched: Watched, small: str) -> None:
    page = watched.page
    page.goto(small)
    for name in ("light", "dark"):
        page.locator("#theme").click()
        assert page.evaluate("document.documentElement.dataset.theme") == name
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.reload()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == dark == "rgb(21, 23, 26)"


def test_a_hundred_thousand_episodes_are_a_few_rows_at_a_time(watched: Watched, many: str, many_episodes: Path) -> None:
    page = watched.page
    page.goto(f"{many}/episodes")
    expect(page.locator("#count")).to_have_text("100,000 episodes")
    grown = "area => { area.scrollTop = area.scrollHeight; return area.scrollHeight > 33 * 5000; }"
    page.wait_for_function(grown, arg=page.locator("#episodes").element_handle(), timeout=60_000)
    assert page.locator("#episodes tbody tr").count() < 120
    words = 'reward<0.5 tokens>60 "the parcel is lost"'
    with StoreSearch(many_episodes, at_rest=True) as store:
        count = store.count(parse_filter(words))
    page.locator("#filter").fill(words)
    expect(page.locator("#count")).to_have_text(f"{count} episodes", timeout=10_000)


@pytest.mark.parametrize(
    "look",
    [
        lambda page: expect(page.locator(".chart").first).to_be_visible(),
        lambda page: expect(page.locator(".verdict")).to_contain_text("held-out"),
    ],
)
def test_a_run_opens_from_a_disk(watched: Watched, files: str, look: Callable[[Page], None]) -> None:
    watched.page.goto(f"{files}/r/small.one/index.html")
    look(watched.page)
    assert all(asked.startswith((files, "data:")) for asked in watched.asked)


def test_files_are_filtered_and_lead_to_each_other(watched: Watched, files: str) -> None:
    page = watched.page
    page.goto(f"{files}/index.html")
    page.get_by_role("link", name="small/one").click()
    page.get_by_role("link", name="Episodes").click()
    expect(page.locator("#count")).to_have_text("13 episodes")
    for words, count in (
        ("reward>=1", 3),
        ("state:trained step:1", 4),
        ("step:2..", 8),
        ('"seven"', 2),
        ("group:0,1", 4),
    ):
        page.locator("#filter").fill(words)
        expect(page.locator("#count")).to_have_text(f"{count} episodes")
    page.locator("#filter").fill("")
    expect(page.locator("#count")).to_have_text("13 episodes")
    page.locator("#episodes tbody a").first.click()
    page.wait_for_url("**/episodes/13.html")
    assert all(asked.startswith((files, "data:")) for asked in watched.asked)


def test_nothing_that_a_model_says_is_run(watched: Watched, small: str, files: str) -> None:
    for place, end in ((small, ""), (files, ".html")):
        for number in range(6, 14):
            watched.page.goto(f"{place}/r/small.one/episodes/{number}{end}#tokens")
        watched.page.goto(f"{place}/r/small.one/groups/3{end}")
        watched.page.goto(f"{place}/r/small.one/episodes{end}")
        expect(watched.page.locator("#episodes")).to_contain_text("<script>alert(1)</script>")


def test_a_served_model_answers_in_tokens_with_their_log_probs(watched: Watched, playground: str) -> None:
    page = watched.page
    page.goto(playground)
    assert "#" not in page.url, "the key leaves the address"
    page.locator("#prompt").fill("Sort 0296")
    page.keyboard.press("Enter")
    expect(page.locator(".role-assistant .tk").first).to_be_visible(timeout=60_000)
    page.locator(".tk").first.hover()
    expect(page.locator("#token-facts")).to_contain_text("log-prob")
    expect(page.locator("#token-facts")).to_contain_text("instead of it:")
    page.locator(".role-assistant .tk").nth(1).click()
    clicked = page.locator("#token-facts").inner_text()
    page.keyboard.press("ArrowLeft")
    expect(page.locator("#token-facts")).not_to_have_text(clicked)
    expect(page.locator("#token-facts")).to_contain_text("instead of it:")
    expect(page.locator(".role-assistant .tk[tabindex='0']")).to_have_count(1)
    page.locator("#key").fill("wrong")
    page.locator("#prompt").fill("again")
    page.keyboard.press("Enter")
    expect(page.locator("#wrong")).to_contain_text("the key is not valid")
    expect(page.locator("#prompt")).to_have_value("again")
    watched.wrong.clear()  # the browser tells of the answer 401


def test_pages_are_read_without_scripts(browser: Browser, small: str) -> None:
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(f"{small}/r/small.one/episodes/4")
    expect(page.get_by_text("where is 7?")).to_be_visible()
    expect(page.get_by_text("reward 0.5")).to_be_visible()
    context.close()


def test_the_screenshots_are_there() -> None:
    assert len(list(Path(KEPT / "screenshots").glob("*.png"))) >= len(PAGES)
