"""What is attacked: `python -m benchmarks.attacked NOTES train --config …` is `areal train …`.

It writes down, in the file NOTES, which directories the driver makes in shared memory: once that is killed, no one else
can say whose they were. Where the environment names a moment, the driver kills itself there, more exactly than anyone
could who looks at it from outside. The agents are those of the runs under attack.
"""

import asyncio
import json
import math
import os
import random
import re
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

from areal.api.workflow_api import AgentWorkflow
from areal.cli.main import main
from areal.infra import workflow_context
from areal.workflow.math_task import MODEL, TRY_AGAIN, openai_client, score
from areal.workflow.openai.math_agent import MathAgent

SAMPLED = "AREAL_ATTACKED_SAMPLED"
"""Names the file in which `TwoTurns` writes down its episodes."""
MOMENT = "AREAL_ATTACKED_MOMENT"
"""Names one of the moments below, or none."""
FIRST_WEIGHTS, CHECKPOINT_BEGUN, CHECKPOINT_UNNAMED, CHECKPOINT_UNRECORDED = MOMENTS = (
    "first weights, or steps trained again",
    "checkpoint begun",
    "checkpoint written, not named",
    "checkpoint named, not recorded",
)
PARTIAL = ".partial"
"""How the directory of a checkpoint ends while that is written."""
SHARED_MEMORY = "/dev/shm/"
SCRATCH = re.compile(r"/dev/shm/[^/]+/")
"""What the path of a directory within the run's own in shared memory begins with."""
DELAY_SECONDS = 0.5
RAISES, HANGS, NOT_A_NUMBER, EXITS = 0.05, 0.05, 0.05, 0.02


class Slow(MathAgent):
    """Takes a while, so that a run lasts long enough to be attacked."""

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
        await asyncio.sleep(random.uniform(0, DELAY_SECONDS))
        return await super().run(data, **extra_kwargs)


class TwoTurns(AgentWorkflow):
    """Asks twice, whatever the first answer is, and writes down each episode that it has sampled."""

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> dict[str, float]:
        began, episode = time.time(), workflow_context.get()
        client, messages = openai_client(extra_kwargs), list(data["messages"])
        rewards: dict[str, float] = {}
        tokens = 0
        for _ in range(2):
            await asyncio.sleep(random.uniform(0, DELAY_SECONDS / 2))
            response = await client.chat.completions.create(model=MODEL, messages=messages)
            answer = response.choices[0].message.content or ""
            tokens += response.usage.completion_tokens if response.usage else 0
            rewards[response.id] = score(answer, data)
            messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": TRY_AGAIN}]
        if not episode.is_eval:
            _write_down({"task": episode.task_id, "seed": episode.seed, "began": began, "tokens": tokens})
        return rewards


def _write_down(episode: dict[str, Any]) -> None:
    """In one write: lines of several workers do not mix, and a killed one leaves a whole line or none."""
    with open(os.environ[SAMPLED], "ab", buffering=0) as file:
        file.write(json.dumps(episode).encode() + b"\n")


class Unreliable(MathAgent):
    """Some of its episodes raise, hang, return NaN or end their process, before or after they call the model.

    Which ones is drawn anew each time: an episode that always ended its process could never be run again.
    """

    def __init__(self) -> None:
        import openai  # noqa: F401  (an episode has a short deadline, the making of an agent has not)

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
        before, share = random.random() < 0.5, random.random()
        reward = 0.0 if before else await super().run(data, **extra_kwargs)
        if (share := share - RAISES) < 0:
            raise LookupError("no such tool")
        if (share := share - HANGS) < 0:
            await self._hang()
        if (share := share - NOT_A_NUMBER) < 0:
            return math.nan
        if share < EXITS:
            os._exit(7)
        return await super().run(data, **extra_kwargs) if before else reward

    async def _hang(self) -> None:
        if random.random() < 0.5:
            await asyncio.Event().wait()
        threading.Event().wait()  # and with it the event loop that runs this agent


def note_shared_memory(notes: str) -> None:
    def audit(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "os.mkdir" and str(arguments[0]).startswith(SHARED_MEMORY):
            with open(notes, "a") as file:
                file.write(f"{arguments[0]}\n")

    sys.addaudithook(audit)


def kill_at(moment: str) -> None:
    """End this process as `kill -9` does, when it first comes to that moment."""
    named: list[str] = []

    def audit(event: str, arguments: tuple[Any, ...]) -> None:
        if event not in ("os.mkdir", "os.rename", "open"):
            return
        path = str(arguments[0])
        if event == "os.rename" and path.endswith(PARTIAL):
            named.append(str(Path(path).parent))
        reached = {
            FIRST_WEIGHTS: event == "os.mkdir" and SCRATCH.match(path),  # where they are about to be written
            CHECKPOINT_BEGUN: event == "os.mkdir" and path.endswith(PARTIAL),
            CHECKPOINT_UNNAMED: event == "os.rename" and path.endswith(PARTIAL),
            CHECKPOINT_UNRECORDED: event == "open" and path in named,  # the directory of its name, to be synchronised
        }
        if reached[moment]:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(audit)


if __name__ == "__main__":
    note_shared_memory(sys.argv[1])
    if os.environ.get(MOMENT):
        kill_at(os.environ[MOMENT])
    sys.exit(main(sys.argv[2:]))
