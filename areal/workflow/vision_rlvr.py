"""A question about pictures, one completion, one verifiable reward.

The pictures of a task become placeholder tokens by the model's own processor, as they do in the proxy.
"""

import asyncio
from collections.abc import Callable
from typing import Any

from areal.api.engine_api import InferenceEngine
from areal.api.errors import WorkflowError
from areal.api.reward_api import AsyncRewardWrapper
from areal.config.generation import GenerationHyperparameters
from areal.trajectory.pictures import pictures_in
from areal.trajectory.renderer import Renderer
from areal.utils.hf_utils import load_hf_processor
from areal.workflow.picture_task import read_messages
from areal.workflow.rlvr import RLVRWorkflow


class VisionRLVRWorkflow(RLVRWorkflow):
    """RLVRWorkflow for tasks with pictures, in the parts of `data["messages"]` or as a list in `data["images"]`.

    A picture is a data URL, a path, encoded bytes or a PIL image. Those in `data["images"]` take the places of parts
    that are `{"type": "image"}` and no more, in order; where there are none, they come before the last user's text.
    """

    def __init__(
        self,
        reward_fn: Callable[..., Any] | AsyncRewardWrapper,
        gconfig: GenerationHyperparameters,
        tokenizer: Any,
        processor: Any = None,
    ) -> None:
        """`processor` None = that of the tokenizer's directory."""
        self._processor = processor if processor is not None else _processor_of(tokenizer)
        super().__init__(reward_fn, gconfig, tokenizer)

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> dict[str, Any] | None:
        """A row as RLVRWorkflow's, and its pictures: `images`, a list of encoded bytes for each row."""
        messages = await asyncio.to_thread(self._shown, data)
        prompt, pictures = self._renderer.render(messages, None), pictures_in(messages)
        ids = await asyncio.to_thread(self._renderer.encode, prompt, pictures)
        images = [picture.data for picture in pictures]
        row = await self._complete(engine, data, prompt, ids, images)
        return None if row is None else {**row, "images": [images]}

    def _open_renderer(self, tokenizer: Any) -> Renderer:
        return Renderer(tokenizer, processor=self._processor)

    def _shown(self, data: dict[str, Any]) -> list[dict[str, Any]]:
        assert self._renderer.sight is not None, "it was made with a processor"
        return read_messages(self._messages(data), data.get("images") or (), self._renderer.sight.album)


def _processor_of(tokenizer: Any) -> Any:
    directory = getattr(tokenizer, "name_or_path", "")
    processor = load_hf_processor(directory) if directory else None
    if processor is None:
        raise WorkflowError(
            f"VisionRLVRWorkflow needs the processor of a model that sees pictures, and the tokenizer's directory "
            f"{directory!r} has none; pass processor=load_hf_processor(...)"
        )
    return processor
