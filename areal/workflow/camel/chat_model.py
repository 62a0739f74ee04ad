"""CAMEL's model backend on what an episode is given; without it, on what the environment says."""

from typing import Any

from areal.workflow.extras import load
from areal.workflow.math_task import MODEL
from areal.workflow.openai.client import openai_client


def camel(module: str) -> Any:
    """A module of CAMEL-AI."""
    return load(f"camel.{module}", "CAMEL-AI", extra="camel")


def chat_model(extra_kwargs: dict[str, Any], **settings: Any) -> Any:
    """For asynchronous steps; `settings` go into each request, e.g. `stream=True`."""
    client = openai_client(extra_kwargs)
    return camel("models").OpenAICompatibleModel(
        model_type=MODEL,
        model_config_dict=settings,
        token_counter=rough_counter(),
        async_client=client,
        client=client,  # never called: one of its own, for synchronous steps, would load certificates in vain
    )


def rough_counter() -> Any:
    """CAMEL's own would download the tokenizer of another model, to guess when a conversation must be shortened."""
    base: Any = camel("utils").BaseTokenCounter

    class RoughCounter(base):
        def count_tokens_from_messages(self, messages: list[Any]) -> int:
            return len(self.encode(str(messages)))

        def encode(self, text: str) -> list[int]:
            return list(text.encode()[::4])

        def decode(self, token_ids: list[int]) -> str:
            raise NotImplementedError("tokens are counted here, never read")

    return RoughCounter()
