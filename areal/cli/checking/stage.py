"""What checked episodes play on: an engine, the proxy in front of it, and a watch over the event loop."""

import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from areal.api.engine_api import InferenceEngine
from areal.api.messages import Stall
from areal.config.generation import GenerationHyperparameters
from areal.infra import workflow_context
from areal.infra.stall_watch import StallWatch
from areal.proxy import NO_SESSION_KEY, Proxy, Session
from areal.rollout.client_environment import environment
from areal.rollout.user_code import call

ENGINES = ("builtin", "fake")
BUILTIN = "builtin:tiny-math"
MAX_NEW_TOKENS = 64
STALL_SECONDS = 0.2
"""Shorter than in training, where a report costs attention."""
STUCK_SECONDS = 5.0
"""What blocks for so long waits for the event loop it blocks, or might as well."""
FAKE_VOCABULARY = 400
FAKE_POSITIONS = 32_768


class WatchedProxy(Proxy):
    """Keeps every session that was opened, for its tree."""

    sessions: list[Session]

    def open_session(self, **options: Any) -> Session:
        session = super().open_session(**options)
        self.sessions.append(session)
        return session


@dataclass
class Stage:
    engine: InferenceEngine
    tokenizer: Any
    tokenizer_path: str
    proxy: WatchedProxy
    gconfig: GenerationHyperparameters
    stalls: list[Stall] = field(default_factory=list)
    """Those that have ended."""

    def watch(self) -> StallWatch:
        return StallWatch(
            STALL_SECONDS,
            lambda stall: None,
            self.stalls.append,
            limit_seconds=STUCK_SECONDS,
            entries=(call.__code__,),
        )


@asynccontextmanager
async def open_stage(kind: str, tasks: Sequence[dict[str, Any]]) -> AsyncIterator[Stage]:
    """`kind` is one of ENGINES; the fake one's tokenizer is made of the tasks' own text."""
    with tempfile.TemporaryDirectory(prefix="areal-check-") as place:
        engine, tokenizer, path, positions = _builtin() if kind == "builtin" else _fake(tasks, Path(place))
        gconfig = GenerationHyperparameters(max_new_tokens=MAX_NEW_TOKENS)
        proxy = WatchedProxy(engine, tokenizer, gconfig=gconfig, max_positions=positions)
        proxy.sessions = []
        await proxy.start()
        stage = Stage(engine, tokenizer, path, proxy, gconfig)
        nowhere = {"OPENAI_BASE_URL": f"{proxy.origin}/v1", "OPENAI_API_KEY": NO_SESSION_KEY}
        watch = stage.watch()
        watch.start()
        try:
            with environment(nowhere):
                yield stage
        finally:
            watch.close()
            await proxy.aclose()
            await workflow_context.close_clients()
            await engine.aclose()


def _builtin() -> tuple[InferenceEngine, Any, str, int]:
    from areal.engine.architecture import read_architecture
    from areal.engine.models import find_model
    from areal.engine.server import load_engine
    from areal.utils.hf_utils import load_hf_tokenizer

    directory = find_model(BUILTIN)
    positions = read_architecture(directory).max_positions
    return load_engine(directory), load_hf_tokenizer(directory), str(directory), positions


def _fake(tasks: Sequence[dict[str, Any]], place: Path) -> tuple[InferenceEngine, Any, str, int]:
    from areal.engine.builtin.tokenizer import make_tokenizer
    from areal.engine.fake import FakeEngine
    from areal.utils.hf_utils import load_hf_tokenizer

    make_tokenizer([str(task) for task in tasks], FAKE_VOCABULARY, FAKE_POSITIONS).save_pretrained(place)
    tokenizer = load_hf_tokenizer(place)
    engine = FakeEngine(vocab_size=len(tokenizer), max_positions=FAKE_POSITIONS, tokenizer=tokenizer)
    return engine, tokenizer, str(place), FAKE_POSITIONS
