"""A file of JSON lines that each name their training step, and that a resumed run continues without repeating itself.

Owns the format only: what a line says is its writer's business.
"""

# MERGED-DOC
# The numbers of a run, one row per step: RUN/metrics.jsonl for programs, RUN/tensorboard for eyes.
# What was said in an episode, for people: one conversation in the terminal, all of them in RUN/rollouts.jsonl.
#
# Model output is shown, never obeyed: markup and control characters in it are printed, not interpreted.

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import orjson
from rich.console import Group
from rich.padding import Padding
from rich.panel import Panel
from rich.text import Text

from areal.api.messages import Episode


class StepLines:
    """Append-only; every line reaches the operating system before `append` returns."""

    def __init__(self, path: Path, start_step: int = 0) -> None:
        """Continue `path`, without the lines of `start_step` and later, which the run is about to write again."""
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            _keep(path, (row for row in read_lines(path) if row["step"] < start_step))
        self._file = path.open("ab", buffering=0)

    def append(self, row: dict[str, Any]) -> None:
        self._file.write(_line(row))

    def close(self) -> None:
        self._file.close()


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a file; a last line that a killed process left half-written is not one."""
    with path.open("rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                yield orjson.loads(line)


def _line(row: dict[str, Any]) -> bytes:
    try:
        return orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE | orjson.OPT_SERIALIZE_NUMPY)
    except TypeError:  # a model may call a tool with a number beyond 64 bits, which orjson refuses
        return json.dumps(row, default=lambda value: value.tolist()).encode() + b"\n"


def _keep(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Rewrite in full beside the file, then swap: a crash leaves the old file or the new one, never less."""
    fresh = path.with_suffix(".tmp")
    with fresh.open("wb") as file:
        for row in rows:
            file.write(_line(row))
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)


METRICS_FILE = "metrics.jsonl"


class MetricsLog:
    def __init__(self, run_dir: str | Path, start_step: int = 0) -> None:
        """`start_step` is the first step that will be written; older rows of it and of later steps are dropped."""
        # Imported here because it takes a tenth of a second and only a run that is being trained needs it.
        from tensorboardX import SummaryWriter

        self._lines = StepLines(Path(run_dir) / METRICS_FILE, start_step)
        self._board: Any = SummaryWriter(str(Path(run_dir) / "tensorboard"), purge_step=start_step or None)

    def write(self, step: int, values: Mapping[str, float | None]) -> None:
        """Add a row. A value that is not finite becomes null in the file: JSON has no word for it."""
        finite = {name: _finite(value) for name, value in values.items() if name != "step"}
        self._lines.append({"step": step, **finite})
        for name, value in finite.items():
            if value is not None:
                self._board.add_scalar(name, value, step)

    def close(self) -> None:
        self._lines.close()
        self._board.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_metrics(run_dir: str | Path) -> list[dict[str, Any]]:
    """The rows written so far, oldest first; none if the run has not begun."""
    path = Path(run_dir) / METRICS_FILE
    return list(read_lines(path)) if path.exists() else []


def _finite(value: float | None) -> float | None:
    if value is None:
        return None
    number = float(value)
    return number if math.isfinite(number) else None


ROLLOUTS_FILE = "rollouts.jsonl"
SHOWN_CHARACTERS = 600
SHOWN_LINES = 12
COLOURS = {"system": "magenta", "user": "cyan", "assistant": "green", "tool": "yellow"}


class RolloutLog:
    """Every accepted episode, one JSON object per line."""

    def __init__(self, run_dir: str | Path, start_step: int = 0) -> None:
        """`start_step` is the first step that will be written; older episodes of it and of later steps are dropped."""
        self._lines = StepLines(Path(run_dir) / ROLLOUTS_FILE, start_step)

    def append(self, step: int, task_id: int, episode: Episode) -> None:
        oldest, newest = versions_of(episode)
        self._lines.append(
            {
                "step": step,
                "task_id": task_id,
                "reward": episode.reward,
                "messages": episode.messages,
                "version_min": oldest,
                "version_max": newest,
                "tokens": tokens_of(episode),
                "calls": episode.calls,
                "seconds": round(episode.seconds, 4),
                "turns": [(round(asked, 4), round(answered, 4), tokens) for asked, answered, tokens in episode.turns],
            }
        )

    def close(self) -> None:
        self._lines.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def tokens_of(episode: Episode) -> int:
    """Sampled tokens that are trained."""
    return sum(int(row.loss_mask.sum()) for row in episode.rows)


def versions_of(episode: Episode) -> tuple[int | None, int | None]:
    """The oldest and the newest weights that an episode's tokens came from."""
    sampled = [row.versions[row.versions >= 0] for row in episode.rows]
    present = [versions for versions in sampled if len(versions)]
    if not present:
        return None, None
    return int(min(versions.min() for versions in present)), int(max(versions.max() for versions in present))


def render_episode(episode: Episode, title: str = "") -> Panel:
    """One whole conversation with its rewards; long contents are clipped and say so."""
    parts = [part for message in episode.messages for part in _render_message(message)]
    return Panel(
        Group(*parts) if parts else Text("no messages were recorded", style="dim"),
        title=Text(title) if title else None,
        title_align="left",
        subtitle=Text(_summary(episode)),
        subtitle_align="left",
        border_style="dim",
    )


def _summary(episode: Episode) -> str:
    oldest, newest = versions_of(episode)
    facts = [f"reward {episode.reward:g}", _count(episode.calls, "call"), _count(tokens_of(episode), "token")]
    if oldest is not None:
        facts.append(f"weights {oldest}" if oldest == newest else f"weights {oldest}–{newest}")
    facts.append(f"{episode.seconds:.2f} s")
    return " · ".join(facts)


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def _render_message(message: Mapping[str, Any]) -> list[Text | Padding]:
    role = str(message.get("role", "?"))
    head = Text(role, style=f"bold {COLOURS.get(role, 'white')}")
    if message.get("reward") is not None:
        head.append(f"  reward {message['reward']:g}", style="bold")
    lines: list[Text | Padding] = [head]
    content = _content_text(message.get("content"))
    if content:
        lines.append(Padding(Text(_clip(_printable(content))), (0, 0, 0, 2)))
    calls = [_call_text(call) for call in message.get("tool_calls") or []]
    lines.extend(Padding(Text(_clip(_printable(call)), style="yellow"), (0, 0, 0, 2)) for call in calls)
    return lines


def _call_text(call: Mapping[str, Any]) -> str:
    function = call.get("function", call)
    arguments = function.get("arguments", "")
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False, separators=(",", ":"))
    return f"→ {function.get('name', '?')}({arguments})"


def _content_text(content: Any) -> str:
    """Text of a message's content, which may be a list of parts; a part without text is named by its type."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "\n".join(_part_text(part) for part in content)
    return str(content)


def _part_text(part: Any) -> str:
    if not isinstance(part, Mapping):
        return str(part)
    return str(part["text"]) if "text" in part else f"[{part.get('type', 'part')}]"


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() or c == "\n" else "�" for c in text.replace("\t", "    "))


def _clip(text: str) -> str:
    text = text.strip("\n")
    kept = "\n".join(text.splitlines()[:SHOWN_LINES])[:SHOWN_CHARACTERS]
    left_out = len(text) - len(kept)
    return kept if left_out <= 0 else f"{kept.rstrip()} … ({left_out:,} more characters)"
