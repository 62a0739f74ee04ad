import io
import json
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from areal.api.messages import Episode, Row
from areal.trainer.logs import RolloutLog, render_episode, tokens_of, versions_of


def make_row(versions: list[int]) -> Row:
    array = np.array(versions, dtype=np.int32)
    zeros = np.zeros(len(versions), dtype=np.float32)
    index = np.where(array >= 0, 0, -1)
    return Row(np.arange(len(versions)), array >= 0, zeros, array, zeros, index, zeros + 1, reward=1.0)


def make_episode(*messages: dict[str, Any], reward: float = 1.0) -> Episode:
    rows = [make_row([-1, -1, 3, 3]), make_row([-1, 4])]
    return Episode(rows=rows, reward=reward, messages=list(messages), calls=2, seconds=0.3125, turns=[(0.1, 0.25, 3)])


def shown(episode: Episode, title: str = "") -> str:
    out = io.StringIO()
    Console(file=out, width=80).print(render_episode(episode, title))
    return out.getvalue()


def test_conversation_shows_roles_contents_rewards_and_a_summary() -> None:
    text = shown(
        make_episode(
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
    text = shown(make_episode({"role": "assistant", "content": None, "tool_calls": [call, parsed]}))
    assert '→ add({"a": 1})' in text
    assert '→ add({"b":2})' in text


def test_long_content_is_clipped_and_says_how_much_is_missing() -> None:
    text = shown(make_episode({"role": "user", "content": "x" * 1000}, {"role": "user", "content": "a\n" * 50}))
    assert "(400 more characters)" in text
    assert "(76 more characters)" in text


def test_model_output_is_shown_and_never_obeyed() -> None:
    text = shown(make_episode({"role": "assistant", "content": "[red]hi[/red]\x1b[2J\r"}))
    assert "[red]hi[/red]�[2J�" in text
    assert "\x1b" not in text


def test_parts_without_text_are_named_by_their_type() -> None:
    parts = [{"type": "text", "text": "look:"}, {"type": "image_url", "image_url": {"url": "data:..."}}]
    text = shown(make_episode({"role": "user", "content": parts}))
    assert "look:" in text
    assert "[image_url]" in text


def test_episode_without_messages_is_shown_too() -> None:
    assert "no messages were recorded" in shown(Episode(rows=[], reward=0.0))


def test_tokens_and_versions_count_sampled_tokens_only() -> None:
    assert tokens_of(make_episode()) == 3
    assert versions_of(make_episode()) == (3, 4)
    assert versions_of(Episode(rows=[make_row([-1])], reward=0.0)) == (None, None)


def test_every_episode_is_one_line_of_the_log(tmp_path: Path) -> None:
    message = {"role": "user", "content": "héllo\n"}
    with RolloutLog(tmp_path) as log:
        log.append(2, 7, make_episode(message))
        log.append(2, 8, make_episode(message, reward=0.0))
    first, second = map(json.loads, (tmp_path / "rollouts.jsonl").read_text().splitlines())
    assert first == {
        "step": 2,
        "task_id": 7,
        "reward": 1.0,
        "messages": [message],
        "version_min": 3,
        "version_max": 4,
        "tokens": 3,
        "calls": 2,
        "seconds": 0.3125,
        "turns": [[0.1, 0.25, 3]],
    }
    assert second["task_id"] == 8


def test_number_beyond_64_bits_in_a_call_is_logged_and_shown(tmp_path: Path) -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 10**30}}}
    episode = make_episode({"role": "assistant", "content": "", "tool_calls": [call]})
    with RolloutLog(tmp_path) as log:
        log.append(1, 7, episode)
    (row,) = map(json.loads, (tmp_path / "rollouts.jsonl").read_text().splitlines())
    assert row["messages"][0]["tool_calls"] == [call]
    assert f'→ add({{"a":{10**30}}})' in shown(episode)


def test_resumed_run_does_not_repeat_episodes(tmp_path: Path) -> None:
    with RolloutLog(tmp_path) as log:
        for step in range(3):
            log.append(step, step, make_episode())
    with RolloutLog(tmp_path, start_step=2) as log:
        log.append(2, 9, make_episode())
    rows = [json.loads(line) for line in (tmp_path / "rollouts.jsonl").read_text().splitlines()]
    assert [(row["step"], row["task_id"]) for row in rows] == [(0, 0), (1, 1), (2, 9)]
