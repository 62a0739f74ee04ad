"""What a person sees of a run while it goes on: the bar, or a few plain lines."""

import io
import logging
import re
import sys

import pytest
from rich.console import Console

from areal.trainer.display import MOST_POINTS, PLAIN_LINES, Announcer, Curve, PatientConsole, Progress, filled, show
from areal.utils.shorten import duration

ROW = {"reward": 0.5, "eval_reward": 0.25, "tokens_per_second": 8123.4, "staleness": 1.25, "rejected": 3, "loss": 0.1}


class Clock:
    """Goes one second further at each look."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1
        return self.now


def plain(total: int, start: int = 0) -> tuple[Progress, io.StringIO]:
    out = io.StringIO()
    return Progress(total, start, Console(file=out, width=40), Clock()), out


def terminal(total: int, width: int = 90) -> tuple[Progress, io.StringIO]:
    out = io.StringIO()
    return Progress(total, console=Console(file=out, width=width, force_terminal=True), clock=Clock()), out


LEGEND = [
    "reward     mean over the step's episodes",
    "held-out   mean reward on tasks that are not trained",
    "tok/s      sampled tokens trained in a second",
    "staleness  updates of the weights between sampling and training, on average",
    "rejected   episodes so far that failed or were too old",
]
"""Each line fits into 80 columns."""


def test_plain_output_is_about_twenty_whole_lines_for_any_run() -> None:
    for total in (1, 7, 20, 1000):
        progress, out = plain(total)
        with progress:
            for step in range(total + 1):
                progress.update(step, ROW)
        lines = out.getvalue().splitlines()
        assert sum(line == LEGEND[0] for line in lines) == 1
        assert min(total, PLAIN_LINES) <= len(lines) - len(LEGEND) <= PLAIN_LINES + 1
        assert lines[-1].startswith(f"step {total}/{total}  ")
        assert "\r" not in out.getvalue()
        assert "\x1b" not in out.getvalue()


def test_a_line_says_everything_a_person_watches() -> None:
    progress, out = plain(10)
    progress.update(0, ROW)
    progress.update(5, ROW)
    assert out.getvalue().splitlines() == [
        *LEGEND,
        "step 0/10  reward 0.50  held-out 0.25  8,123 tok/s  staleness 1.2  rejected 3  1 s",
        "step 5/10  reward 0.50  held-out 0.25  8,123 tok/s  staleness 1.2  rejected 3  2 s, 2 s left",
    ]


def test_held_out_success_stays_on_show_between_evaluations() -> None:
    progress, out = plain(2)
    progress.update(1, {"eval_reward": 0.4, "reward": 0.1})
    progress.update(2, {"eval_reward": None, "reward": 0.2})
    assert out.getvalue().splitlines()[-1] == "step 2/2  reward 0.20  held-out 0.40  2 s"


def test_curve_of_a_resumed_run_begins_with_its_earlier_steps() -> None:
    progress, out = terminal(4)
    progress.recall([{"eval_reward": 0.25}, {"reward": 0.0}, {"reward": 1.0}])
    with progress:
        progress.update(3, {"reward": 0.5})
    assert "reward 0.50 ▁█▅  held-out 0.25" in out.getvalue()


def test_resumed_run_spreads_its_lines_over_what_is_left() -> None:
    progress, out = plain(1000, start=980)
    for step in range(980, 1001):
        progress.update(step, ROW)
    assert len(out.getvalue().splitlines()) == len(LEGEND) + 21


def test_terminal_shows_a_bar_and_the_last_numbers() -> None:
    progress, out = terminal(10)
    with progress:
        progress.update(0, ROW)
        progress.update(4, {**ROW, "reward": 0.9})
    shown = out.getvalue()
    assert "4/10" in shown
    assert "reward 0.90 ▅▇  held-out 0.25  8,123 tok/s  staleness 1.2  rejected 3" in shown
    assert "left" in shown


def drawn(width: int) -> list[str]:
    """The lines that a terminal of that width has at the end."""
    progress, out = terminal(10, width)
    with progress:
        progress.update(0, {**ROW, "reward": 0.0})
        for step in range(1, 9):
            progress.update(step, ROW)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out.getvalue())
    return text[text.rindex("step 8/10") :].splitlines()


@pytest.mark.parametrize("width", [200, 120, 80, 60, 40, 20])
def test_live_lines_fit_their_terminal_and_break_between_figures(width: int) -> None:
    lines = drawn(width)
    assert max(map(len, lines)) <= width
    assert [part for line in lines for part in line.strip().split("  ")][-3:] == [
        "8,123 tok/s",
        "staleness 1.2",
        "rejected 3",
    ]
    assert sum("▁▅" in line for line in lines) == 1
    assert any("━" in line for line in lines) == (width >= 40)


def test_what_else_is_done_is_shown_beside_the_figures_until_it_is_over() -> None:
    progress, out = terminal(10)
    with progress:
        progress.update(4, ROW)
        with progress.waiting("evaluating on 512 held-out tasks"):
            progress.say("above")
        during = out.getvalue()
        progress.say("above")
    assert "evaluating on 512 held-out tasks …" in during
    assert "evaluating" not in out.getvalue().removeprefix(during)


def test_quiet_run_says_only_what_it_must() -> None:
    for make in (plain, terminal):
        progress, out = make(10)
        progress._quiet = True
        with progress:
            progress.update(0, ROW)
            progress.note("nice to know")
            with progress.spinner("starting"):
                progress.say("the disk is full")
        assert out.getvalue() == "the disk is full\n"


def test_dumb_terminal_gets_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    progress, out = terminal(1)
    with progress, progress.waiting("evaluating"):
        progress.update(1, ROW)
    assert any(line.startswith("step 1/1  reward 0.50") for line in out.getvalue().splitlines())
    assert "\x1b" not in out.getvalue()


class ClosedPipe(io.StringIO):
    """At whose other end is nobody."""

    def flush(self) -> None:
        raise BrokenPipeError


@pytest.mark.parametrize("is_terminal", [True, False])
def test_run_goes_on_when_nobody_reads_what_it_says(is_terminal: bool) -> None:
    progress = Progress(2, console=PatientConsole(file=ClosedPipe(), force_terminal=is_terminal))
    with progress:
        progress.update(1, ROW)
        progress.say("the end")


def test_text_is_broken_between_words_and_a_path_stays_whole() -> None:
    out = io.StringIO()
    path = f"/somewhere/{'x' * 60}/model"
    show(
        Console(file=out, width=40, force_terminal=True),
        f"a sentence that is longer than the line\nmodel  {path} 好好好好好好好好好",
    )
    assert out.getvalue().splitlines() == [
        "a sentence that is longer than the line",
        "model ",
        f"  {path}",
        "  好好好好好好好好好",
    ]
    assert filled(["好" * 10, "a"], 20, " ") == ["好" * 10, "a"]


def test_curve_is_the_whole_course_however_long_it_is() -> None:
    curve = Curve()
    assert curve.drawn(10) == ""
    steps = 3 * MOST_POINTS
    for step in range(steps):
        curve.add(step / steps)
    assert curve.drawn(8) == "▁▂▃▄▅▆▇█"
    assert len(curve._points) < MOST_POINTS
    curve = Curve()
    for reward in (-20.0, -5.0, 10.0, 10.0):
        curve.add(reward)
    assert curve.drawn(8) == "▁▅██"


def test_log_lines_go_above_the_bar_and_find_their_way_back() -> None:
    logger, elsewhere = logging.getLogger("areal"), io.StringIO()
    handlers = [logging.StreamHandler(sys.stderr), logging.StreamHandler(elsewhere)]
    for handler in handlers:
        logger.addHandler(handler)
    try:
        before = sys.stderr
        progress, out = terminal(10)
        with progress:
            progress.update(0, ROW)
            logger.warning("seen above the bar")
        assert "seen above the bar" in out.getvalue()
        assert elsewhere.getvalue() == "seen above the bar\n"
        assert [handler.stream for handler in handlers] == [before, elsewhere]
    finally:
        for handler in handlers:
            logger.removeHandler(handler)


@pytest.mark.parametrize("make", [plain, terminal])
def test_say_prints_brackets_as_they_are(make: object) -> None:
    progress, out = make(10)  # type: ignore[operator]
    with progress:
        progress.update(0, ROW)
        progress.say("reward [bold]1[/bold] :smile: in a sentence that is longer than the plain console is wide")
    assert "reward [bold]1[/bold] :smile: in a sentence that is longer than the plain console is wide" in out.getvalue()


def test_spinner_says_what_is_awaited_and_how_long_it_took() -> None:
    progress, out = plain(10)
    with progress.spinner("making the model"):
        assert out.getvalue() == "making the model …\n"
    assert out.getvalue().splitlines()[-1] == "making the model: 1.0 s"


def test_spinner_of_a_failed_phase_claims_no_success() -> None:
    progress, out = terminal(10)
    with pytest.raises(OSError, match="disk"), progress.spinner("making the model"):
        raise OSError("disk")
    assert "making the model:" not in out.getvalue()


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0 s"), (59, "59 s"), (59.6, "1 min 0 s"), (200, "3 min 20 s"), (7500, "2 h 5 min")]
)
def test_duration_reads_like_a_person_says_it(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_announcer_says_its_first_and_last_word_where_there_is_no_terminal() -> None:
    out = io.StringIO()
    with Announcer(Console(file=out, width=20), Clock()) as report:
        for step in range(5):
            report(f"making a [model], which takes a while: step {step}", step / 5)
    assert out.getvalue().splitlines() == [
        "making a [model], which takes a while: step 0",
        "making a [model], which takes a while: step 4, 1 s",
    ]


@pytest.mark.parametrize(("share", "estimate"), [(0.0, r"\d s"), (0.25, r"about \d+ s left"), (1.2, "not much longer")])
def test_announcer_shows_a_bar_with_an_estimate_and_leaves_the_last_word(share: float, estimate: str) -> None:
    out = io.StringIO()
    with Announcer(Console(file=out, width=60, force_terminal=True), Clock()) as report:
        report("making a model", share)
    assert re.search(rf"━.* {estimate}\n", out.getvalue())
    assert re.search(r"making a model, \d s\n$", out.getvalue())


def test_announcer_that_is_never_called_says_nothing() -> None:
    out = io.StringIO()
    with Announcer(Console(file=out)):
        pass
    assert out.getvalue() == ""
