"""How many files a newcomer opens to follow one chat call: the package is to stay readable as it grows."""

import sys
from pathlib import Path
from types import FrameType
from typing import Any

from sdk_call import DATA, chat

import areal
from areal.api.messages import GroupTask
from areal.rollout.dispatch import pack_task

MOST_FILES = 33
PACKAGE = Path(areal.__file__).parent
OTHER_END = {"engine/inference/fake.py", "engine/inference/sequence.py", "engine/inference/grammar.py"}
"""Files of the served engine, which a run has in a process of its own."""


class Follower:
    """An inline agent that notes the files of the package which its second call passes."""

    files: set[str] = set()  # noqa: RUF012
    around: set[int] = set()  # noqa: RUF012
    """The frames that wait for the agent: they are resumed with it, and are no part of its call."""

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
        tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
        first = await chat(extra_kwargs, data["messages"], tools=tools)
        said = first.choices[0].message.model_dump(exclude_none=True)
        messages = [*data["messages"], said, {"role": "user", "content": "hello there"}]
        around: FrameType | None = sys._getframe()
        while around is not None:
            self.around.add(id(around))
            around = around.f_back
        sys.setprofile(self._note)
        try:
            await chat(extra_kwargs, messages, tools=tools)
        finally:
            sys.setprofile(None)
        return 1.0

    def _note(self, frame: FrameType, event: str, argument: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and id(frame) not in self.around and path.is_relative_to(PACKAGE):
            self.files.add(path.relative_to(PACKAGE).as_posix())


async def test_one_chat_call_of_an_inline_agent_passes_few_files(start_worker):
    worker = await start_worker("test_call_path.Follower")
    result = await worker.run_group(GroupTask(0, pack_task(dict(DATA)), n_samples=1))
    assert [episode.calls for episode in result.episodes] == [2]
    files = sys.modules["test_call_path"].Follower.files - OTHER_END
    assert "proxy/delivery.py" in files
    assert "infra/rpc/channel.py" in files
    assert len(files) <= MOST_FILES, sorted(files)
