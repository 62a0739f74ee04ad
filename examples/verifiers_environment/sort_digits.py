"""A verifiers environment of one file: sort the digits of a number, and how many are in their place is the reward.

It exports a taskset and a harness, as any package on the Environments Hub may. The harness talks to the model in this
process; those of the library start a program for each rollout.
"""

import random
from collections.abc import Iterator

import verifiers.v1 as vf
from openai import AsyncOpenAI

__all__ = ["ChatHarness", "SortDigits"]


class NumberData(vf.TaskData):
    answer: str


class NumberTask(vf.Task[NumberData]):
    @vf.reward
    async def in_place(self, trace: vf.Trace) -> float:
        """The share of digits that stand where they should."""
        said = self._said(trace)
        return sum(a == b for a, b in zip(said, self.data.answer, strict=False)) / max(len(said), len(self.data.answer))

    @vf.metric
    async def all_right(self, trace: vf.Trace) -> float:
        return float(self._said(trace) == self.data.answer)

    def _said(self, trace: vf.Trace) -> str:
        replies = [node.message.content for node in trace.nodes if node.message.role == "assistant"]
        return str(replies[-1] or "").strip() if replies else ""


class SortDigitsConfig(vf.TasksetConfig):
    length: int = 4
    size: int = 1000


class SortDigits(vf.Taskset[NumberTask, SortDigitsConfig]):
    def load(self) -> Iterator[NumberTask]:
        chosen = random.Random(1)
        for _ in range(self.config.size):
            number = "".join(chosen.choices("0123456789", k=self.config.length))
            data = NumberData(prompt=f"Sort {number}", answer="".join(sorted(number)))
            yield NumberTask(data, self.config.task)


class ChatHarnessConfig(vf.HarnessConfig):
    pass


class ChatHarness(vf.Harness[ChatHarnessConfig]):
    """One question, one answer."""

    APPENDS_SYSTEM_PROMPT = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
    ) -> vf.ProgramResult:
        messages = [{"role": "user", "content": data.prompt_text}]
        # Its default gives a connection five seconds, which a full machine may take.
        async with AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0, timeout=600) as client:
            await client.chat.completions.create(model=ctx.model, messages=messages)
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")
