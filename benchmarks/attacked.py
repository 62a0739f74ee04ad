"""What `benchmarks.survival` attacks: `python -m benchmarks.attacked NOTES train --config …` is `areal train …`.

It writes down, in the file NOTES, which directories the driver makes in shared memory: once that is killed, no one else
can say whose they were. The agents are those of the runs under attack.
"""

import asyncio
import math
import os
import random
import sys
import threading
from typing import Any

from areal.cli.main import main
from areal.workflow.openai.math_agent import MathAgent

SHARED_MEMORY = "/dev/shm/"
DELAY_SECONDS = 0.5
RAISES, HANGS, NOT_A_NUMBER, EXITS = 0.05, 0.05, 0.05, 0.02


class Slow(MathAgent):
    """Takes a while, so that a run lasts long enough to be attacked."""

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
        await asyncio.sleep(random.uniform(0, DELAY_SECONDS))
        return await super().run(data, **extra_kwargs)


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


if __name__ == "__main__":
    note_shared_memory(sys.argv[1])
    sys.exit(main(sys.argv[2:]))
