"""What a person sees of a run: the bar or a few plain lines, conversations, and notices at its start and its end."""

import io
import logging
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from small_runs import make_conversation

from areal.api.messages import Episode
from areal.trainer import display
from areal.trainer.display import PLAIN_LINES, Announcer, Progress, render_episode
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


def terminal(total: int) -> tuple[Progress, io.StringIO]:
    out = io.StringIO()
    return Progress(total, console=Console(file=out, width=90, force_terminal=True), clock=Clock()), out


def test_plain_output_is_about_twenty_whole_lines_for_any_run() -> None:
    for total in (1, 7, 20, 1000):
        progress, out = plain(total)
        with progress:
            for step in range(total + 1):
                progress.update(step, ROW)
        lines = out.getvalue().splitlines()
        assert min(total, PLAIN_LINES) <= len(lines) <= PLAIN_LINES + 1
        assert lines[-1].startswith(f"step {total}/{total}  ")
        assert "\r" not in out.getvalue()
        assert "\x1b" not in out.getvalue()


def test_a_line_says_everything_a_person_watches() -> None:
    progress, out = plain(10)
    progress.update(0, ROW)
    progress.update(5, ROW)
    assert out.getvalue().splitlines() == [
        "step 0/10  reward 0.50  held-out 0.25  8,123 tok/s  staleness 1.2  rejected 3",
        "step 5/10  reward 0.50  held-out 0.25  8,123 tok/s  staleness 1.2  rejected 3  1 s left",
    ]


def test_held_out_success_stays_on_show_between_evaluations() -> None:
    progress, out = plain(2)
    progress.update(1, {"eval_reward": 0.4, "reward": 0.1})
    progress.update(2, {"eval_reward": None, "reward": 0.2})
    assert out.getvalue().splitlines()[-1] == "step 2/2  reward 0.20  held-out 0.40"


def test_resumed_run_spreads_its_lines_over_what_is_left() -> None:
    progress, out = plain(1000, start=980)
    for step in range(980, 1001):
        progress.update(step, ROW)
    assert len(out.getvalue().splitlines()) == 21


def test_terminal_shows_a_bar_and_the_last_numbers() -> None:
    progress, out = terminal(10)
    with progress:
        progress.update(0, ROW)
        progress.update(4, {**ROW, "reward": 0.9})
    shown = out.getvalue()
    assert "4/10" in shown
    assert "reward 0.90  held-out 0.25  8,123 tok/s  staleness 1.2  rejected 3" in shown
    assert "left" in shown


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
    with Announcer(Console(file=out, width=20)) as report:
        for step in range(5):
            report(f"making a [model], which takes a while: step {step}")
    assert out.getvalue().splitlines() == [
        "making a [model], which takes a while: step 0",
        "making a [model], which takes a while: step 4",
    ]


def test_announcer_keeps_one_changing_line_in_a_terminal_and_leaves_the_last_word() -> None:
    out = io.StringIO()
    with Announcer(Console(file=out, width=60, force_terminal=True)) as report:
        report("step 1")
        report("step 2")
    assert out.getvalue().endswith("step 2\n")


def test_announcer_that_is_never_called_says_nothing() -> None:
    out = io.StringIO()
    with Announcer(Console(file=out)):
        pass
    assert out.getvalue() == ""


def shown(episode: Episode, title: str = "") -> str:
    out = io.StringIO()
    Console(file=out, width=80).print(render_episode(episode, title))
    return out.getvalue()


def test_conversation_shows_roles_contents_rewards_and_a_summary() -> None:
    text = shown(
        make_conversation(
            {"role": "user", "content": "What is 2 + 2?"},
            {"role": "assistant", "content": "4", "reward": 0.5},
        ),
        title="step 3",
    )
    assert "step 3" in text
    assert "What is 2 + 2?" in text
    assert "assistant  reward 0.5" in text
    assert "reward 1 · 2 calls · 3 tokens · weights 3–4 · 0.31 s" in text


def test_tool_calls_are_shown_as_calls() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    parsed = {"type": "function", "function": {"name": "add", "arguments": {"b": 2}}}
    text = shown(make_conversation({"role": "assistant", "content": None, "tool_calls": [call, parsed]}))
    assert '→ add({"a": 1})' in text
    assert '→ add({"b":2})' in text


def test_long_content_is_clipped_and_says_how_much_is_missing() -> None:
    text = shown(make_conversation({"role": "user", "content": "x" * 1000}, {"role": "user", "content": "a\n" * 50}))
    assert "(400 more characters)" in text
    assert "(76 more characters)" in text


def test_model_output_is_shown_and_never_obeyed() -> None:
    text = shown(make_conversation({"role": "assistant", "content": "[red]hi[/red]\x1b[2J\r"}))
    assert "[red]hi[/red]�[2J�" in text
    assert "\x1b" not in text


def test_parts_without_text_are_named_by_their_type() -> None:
    parts = [{"type": "text", "text": "look:"}, {"type": "image_url", "image_url": {"url": "data:..."}}]
    text = shown(make_conversation({"role": "user", "content": parts}))
    assert "look:" in text
    assert "[image_url]" in text


def test_episode_without_messages_is_shown_too() -> None:
    assert "no messages were recorded" in shown(Episode(rows=[], reward=0.0))


def test_number_beyond_64_bits_in_a_call_is_shown() -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 10**30}}}
    text = shown(make_conversation({"role": "assistant", "content": "", "tool_calls": [call]}))
    assert f'→ add({{"a":{10**30}}})' in text


SUMMARY: dict[str, Any] = {
    "calls": 12345,
    "calls_per_second": 321.4,
    "overlap": 0.712,
    "cpu_seconds": {"driver": 30.2, "rollout worker 0": 11.0},
    "weight_pause_seconds": {"median": 0.0031, "max": 0.0124},
    "max_logprob_difference": 7.6e-06,
    "greedy_verdict": "greedy 0.61 → 0.97 on 512 held-out tasks",
    "verdict": "held-out success 0.41 → 0.93 in 58 s",
}


def test_closing_lines_say_how_well_it_went_and_where_everything_is() -> None:
    assert display.results(SUMMARY) == [
        "12,345 model calls, 321 per second · engine busy during 71% of training",
        "processor time · driver: 30 s · rollout worker 0: 11 s",
        "new weights held generation up for 3 ms (median), 12 ms at most",
        "engine and trainer log-probs differ by at most 8e-06",
        "greedy 0.61 → 0.97 on 512 held-out tasks",
        "held-out success 0.41 → 0.93 in 58 s",
    ]
    assert display.places(Path("runs/a"), Path("runs/a/m"), Path("runs/a/c.png")) == [
        "curve       runs/a/c.png",
        "run         runs/a",
        "model       runs/a/m",
        "talk to it  areal chat runs/a/m",
    ]


def test_run_without_held_out_tasks_has_no_verdict() -> None:
    bare = {key: value for key, value in SUMMARY.items() if "verdict" not in key}
    text = "\n".join(display.results(bare))
    assert "held-out" not in text
    assert "greedy" not in text


def test_log_probs_that_were_never_compared_are_not_said_to_be_equal() -> None:
    lines = display.results(SUMMARY | {"max_logprob_difference": None})
    assert (
        "engine and trainer log-probs were not compared: no token of the weights in training had an advantage" in lines
    )
    assert not any("differ by at most" in line for line in lines)


def test_what_was_dropped_for_its_age_is_compared_with_what_was_trained() -> None:
    trained = {"groups": 90, "episode_seconds": 4.91, "episode_tokens": 80.4, "episode_reward": 0.5}
    dropped = {"groups": 10, "episode_seconds": 11.2, "episode_tokens": 131.0, "episode_reward": 0.254}
    line = (
        "10 groups (10.0%) were dropped as too old; their mean episode against the trained: seconds 11 against 4.9, "
        "tokens 131 against 80, reward 0.25 against 0.50; rollout.when_stale=wait trains them all"
    )
    assert line in display.results(SUMMARY | {"trained": trained, "dropped": dropped})
    assert not any(
        "dropped" in each for each in display.results(SUMMARY | {"trained": trained, "dropped": {"groups": 0}})
    )


def test_stopped_run_says_how_to_go_on() -> None:
    text = display.stopped(Path("runs/sort/blue"), 7, 20)
    assert text.splitlines() == [
        "stopped after step 7 of 20; everything is saved in runs/sort/blue",
        "to go on, give the same command with trial_name=blue",
    ]
    assert "before the first step" in display.stopped(Path("runs/sort/blue"), 0, 20)


def test_resumed_run_says_where_it_resumes() -> None:
    assert display.hello(Path("runs/a"), 7) == "run directory runs/a (resuming after step 7)"
    assert display.hello(Path("runs/a"), 0) == "run directory runs/a"
