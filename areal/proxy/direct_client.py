"""The direct client: an `AsyncOpenAI` on top of an engine, with the recording of the proxy and no network.

It is a proxy with one session and no listening socket. Belongs to one event loop and to one conversation space: make
one per episode. It refuses to own the engine, which stays open.
"""

from typing import Any

import httpx
from openai import AsyncOpenAI

from areal.api.engine_api import InferenceEngine
from areal.api.errors import RewardInvalid
from areal.config.rollout import GenerationHyperparameters, ProxyLimits
from areal.proxy.interactions import Interaction, interactions
from areal.proxy.proxy import Proxy
from areal.proxy.transport import CALL_SECONDS, in_process_transport
from areal.trajectory import Tree, assign_reward
from areal.trajectory.export import ExportStyle

ORIGIN = "http://areal.invalid"
"""A name that resolves nowhere: calls to it never leave the process."""
NO_LIMIT = 1 << 40
"""Tokenizers that do not know their model's context length report numbers beyond this."""


class _InProcessProxy(Proxy):
    """A proxy that does not listen."""

    @property
    def origin(self) -> str:
        return ORIGIN

    def open_client(self) -> httpx.AsyncClient:
        """A client without a network, so that making one reads no certificates."""
        transport = in_process_transport(httpx, self._app)
        return httpx.AsyncClient(transport=transport, timeout=CALL_SECONDS, trust_env=False)


class ArealOpenAI(AsyncOpenAI):
    def __init__(
        self,
        engine: InferenceEngine,
        tokenizer: Any,
        *,
        gconfig: GenerationHyperparameters | None = None,
        max_positions: int | None = None,
        limits: ProxyLimits | None = None,
        drop_params: bool = False,
        processor: Any = None,
        max_retries: int = 0,
        **options: Any,
    ) -> None:
        """`gconfig` = how to sample unless a call says otherwise; `max_positions` = the tokenizer's `model_max_length`;
        `processor` = the model's (`areal.utils.hf_utils.load_hf_processor`), for images.

        `options` are those of `AsyncOpenAI`, except its address, key and HTTP client.
        """
        proxy = _InProcessProxy(
            engine,
            tokenizer,
            gconfig=gconfig or GenerationHyperparameters(),
            max_positions=_positions(tokenizer) if max_positions is None else max_positions,
            limits=limits,
            drop_params=drop_params,
            processor=processor,
        )
        session = proxy.open_session()
        self._proxy = proxy
        self._session = session
        self._turn_discount: float | None = None
        super().__init__(
            base_url=session.base_url,
            api_key=session.api_key,
            http_client=proxy.open_client(),  # type: ignore[arg-type]  # typed as httpx2's, works with both
            max_retries=max_retries,
            **options,
        )

    @property
    def tree(self) -> Tree:
        """The conversations so far, token by token."""
        return self._session.tree

    def set_reward(self, completion_id: str, reward: float) -> None:
        """Reward an answer by its `id`; a later reward replaces an earlier one."""
        assign_reward(self.tree, {completion_id: reward}, "ArealOpenAI.set_reward")

    def set_last_reward(self, reward: float) -> None:
        """Reward the answer that finished last."""
        if isinstance(reward, dict):
            raise RewardInvalid("set_last_reward takes a number; reward several answers by set_reward(id, reward)")
        assign_reward(self.tree, reward, "ArealOpenAI.set_last_reward")

    def apply_reward_discount(self, turn_discount: float = 1.0) -> None:
        """What a later turn's return is worth to the turn before it; without this, all of it."""
        if not 0 <= turn_discount <= 1:
            raise ValueError(f"turn_discount must lie in [0, 1], got {turn_discount}")
        self._turn_discount = turn_discount

    def export_interactions(self, style: ExportStyle = "individual") -> dict[str, Interaction]:
        """What a RolloutWorkflow may return: rows by the id of the answer each ends with.

        individual = one per answer; concat = one per conversation.
        """
        discounted = self._turn_discount is not None
        discount = 1.0 if self._turn_discount is None else self._turn_discount
        return interactions(self.tree, style, discount, discounted=discounted)

    def copy(self, **options: Any) -> AsyncOpenAI:  # type: ignore[override]  # the copy has no engine of its own
        """A plain client with other options, recorded here as well."""
        plain = AsyncOpenAI(
            base_url=self._session.base_url,
            api_key=self._session.api_key,
            http_client=self._client,
            max_retries=self.max_retries,
            timeout=self.timeout,
            default_headers=self._custom_headers,
            default_query=self._custom_query,
        )
        return plain.copy(**options)

    with_options = copy  # type: ignore[assignment]

    async def close(self) -> None:
        """Abort what runs and refuse further calls; rewards and exports stay possible."""
        await self._proxy.aclose()
        await super().close()


def _positions(tokenizer: Any) -> int:
    length = getattr(tokenizer, "model_max_length", None)
    if not isinstance(length, int) or not 0 < length < NO_LIMIT:
        raise ValueError(
            f"max_positions must be given if the tokenizer has no model_max_length, got {length!r} there; pass the "
            "model's max_position_embeddings"
        )
    return length
