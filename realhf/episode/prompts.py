"""A task of a dataset as an agent meets it: a question's id and its tokens."""

from typing import Any

import torch

from areal.api.errors import WorkflowError
from areal.trajectory.renderer import Renderer
from realhf.api.core.data_api import SequenceSample
from realhf.episode.tasks import qid_of


def prompt_of(task: dict[str, Any], renderer: Renderer) -> SequenceSample:
    """`messages` go through the chat template; a `prompt` is text that has been through one."""
    if "messages" in task:
        text = renderer.render(task["messages"], None)
    elif isinstance(task.get("prompt"), str):
        text = task["prompt"]
    else:
        keys = ", ".join(map(repr, task)) or "none"
        raise WorkflowError(f"a task must have `messages`, or a `prompt` as text, got the keys {keys}")
    ids = renderer.encode(text)
    return SequenceSample(
        ids=[qid_of(task)],
        data={"packed_prompts": torch.tensor(ids)},
        seqlens={"packed_prompts": [[len(ids)]]},
        metadata={"task": [task]},
    )
