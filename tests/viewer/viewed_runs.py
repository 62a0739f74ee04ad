"""Runs for the viewer's tests: a small one that has everything, and what a hostile model might say."""

from dataclasses import asdict
from pathlib import Path

import numpy as np

from areal.api.errors import RejectReason
from areal.api.messages import Episode, GroupResult, Node, Rejection, Row, TrainedRow
from areal.store.records import StepRecord
from areal.store.writer import StoreWriter
from areal.trainer.evaluation import Evaluation

HOSTILE = (
    "<script>alert(1)</script><img src=x onerror=alert(2)>",
    "\x1b[31mred\x1b[0m \x00 \x7f \x9b31m",
    "\u202egnp.exe \u2067שלום\u2069 مرحبا",
    "</script><script type=text/javascript>alert(3)</script>",
    '" onmouseover="alert(4)',
    "javascript:alert(5)",
    "\ud800 lone",
)
LONG = "x" * 1_000_000
CONFIG = {
    "experiment_name": "small",
    "tokenizer_path": "builtin:tiny-math",
    "actor": {"path": "builtin:tiny-math", "group_baseline": "mean", "adv_norm": "none", "optimizer": {"lr": 3e-4}},
}


def row_of(prompt: list[int], *completions: list[int], first: int = 0, trained: bool = True, version: int = 0) -> Row:
    """A prompt, and completions that follow each other, numbered from `first`."""
    ids = [*prompt, *(each for completion in completions for each in completion)]
    index = [-1] * len(prompt) + [first + place for place, each in enumerate(completions) for _ in each]
    sampled = np.array(index) >= 0
    return Row(
        input_ids=np.array(ids, np.int32),
        loss_mask=sampled if trained else np.zeros_like(sampled),
        logprobs=np.where(sampled, -0.25, 0).astype(np.float32),
        versions=np.where(sampled, version, -1).astype(np.int32),
        returns=np.where(sampled, 0.9, 0).astype(np.float32),
        completion_index=np.array(index, np.int32),
        temperatures=np.ones(len(ids), np.float32),
        reward=1.0,
    )


def node(parent: int | None, said: str, answer: str, *, extends: bool = True, reward: float | None = None) -> Node:
    asked = [{"role": "user", "content": said}] if said else []
    return Node(parent, extends, asked, {"role": "assistant", "content": answer}, reward, "stop", [], 0.0, 0.5)


def plain_episode(text: str, reward: float, version: int = 0) -> Episode:
    said = [{"role": "user", "content": "3 + 4?"}, {"role": "assistant", "content": text, "reward": reward}]
    row = row_of([40, 41, 42], [43, 44], version=version)
    return Episode([row], reward, said, calls=1, seconds=0.5, turns=[(0.0, 0.4, 2)])


def branching_episode() -> Episode:
    """Two answers after the first, and one whose conversation the template rendered anew."""
    nodes = [
        node(None, "begin", "one"),
        node(0, "left", "two", reward=1.0),
        node(0, "right", "three"),
        node(1, "on", "four", extends=False),
    ]
    rows = [
        row_of([10, 11], [12], [13, 14]),
        row_of([10, 11, 12, 20], [21], first=2),
        row_of([10, 11, 12, 99, 14, 30], [31], first=3),
    ]
    messages = [message for each in (nodes[0], nodes[1]) for message in (*each.messages, each.message)]
    return Episode(rows, 1.0, messages, calls=4, seconds=2.0, nodes=nodes)


def tool_episode() -> Episode:
    call = {"type": "function", "function": {"name": "look_up", "arguments": '{"order": 7}'}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "where is 7?"}, {"type": "image_url"}]},
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "let me see"},
        {"role": "tool", "content": "it is lost", "name": "look_up"},
        {"role": "assistant", "content": "lost", "reward": 0.5},
    ]
    return Episode([row_of([1, 2], [3], [4])], 0.5, messages, calls=2, seconds=1.0)


def trained_of(episode: Episode, advantage: float) -> list[TrainedRow]:
    counts = [int(row.loss_mask.sum()) for row in episode.rows]
    return [
        TrainedRow(*(np.full(count, value, np.float32) for value in (advantage, -0.3, 0.7))) for count in counts
    ]  # fmt: skip


def evaluation(reward: float) -> Evaluation:
    return Evaluation(reward, 4, 0, True, 4, [reward - 0.1, reward + 0.1], [], [reward] * 4)


def write_run(directory: Path, *, experiment: str = "small", lr: float = 3e-4) -> Path:
    """Groups 0 and 1 are trained, 2 is rejected, 3 says what hostile models say; 0 has no signal, 1 has branches."""
    directory.mkdir(parents=True)
    (directory / "config.yaml").write_text("experiment_name: small\n")
    config = {**CONFIG, "experiment_name": experiment, "actor": {**CONFIG["actor"], "optimizer": {"lr": lr}}}  # type: ignore[dict-item]
    equal = GroupResult(0, [plain_episode("seven", 1.0), plain_episode("seven!", 1.0)], [], {})
    mixed = GroupResult(1, [branching_episode(), tool_episode()], [], {})
    stale = GroupResult(2, [plain_episode("old", 0.0)], [], {})
    hostile = [plain_episode(text, 0.0) for text in (*HOSTILE, LONG)]
    with StoreWriter(directory) as store:
        store.set_meta({"config": config, "total_steps": 2})
        store.session(0, {"host": "here"})
        before, after = (
            {"key": key, "when": key, "result": asdict(evaluation(reward))}
            for key, reward in (("before", 0.25), ("after", 0.75))
        )
        store.evaluation(0, {"eval_reward": 0.25, "eval_reward_low": 0.15, "eval_reward_high": 0.35}, before)
        for number in range(4):
            store.started(number, 0, {"messages": [{"role": "user", "content": "3 + 4?"}], "answer": "7 <b>"})
        for group in (equal, mixed):
            store.ready(group)
        store.rejected(stale, Rejection(RejectReason.STALE, "too <i>old</i>", "Traceback <b>here</b>"))
        trained = {group.task_id: [trained_of(each, 0.25) for each in group.episodes] for group in (equal, mixed)}
        figures = {"reward": 0.75, "staleness": 0.0, "tokens_per_second": 100.0, "time_seconds": 2.0}
        store.step(StepRecord(1, 1, "d1", [0, 1], figures, {"calls": 3}, trained))
        store.ready(GroupResult(3, hostile, [], {}))
        store.step(StepRecord(2, 2, "d2", [3], {**figures, "reward": 0.0}, {"calls": 4}))
        store.evaluation(2, {"eval_reward": 0.75, "eval_reward_low": 0.65, "eval_reward_high": 0.85}, after)
    (directory / "summary.json").write_text('{"verdict": "held-out success 0.25 → 0.75"}')
    return directory
