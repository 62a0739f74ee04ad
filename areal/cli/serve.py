"""`areal serve --model M --port P --api-key KEY`: the proxy on a model alone, for any client that takes a base URL.

The key has one session, open as long as the server. It keeps what recent conversations need and forgets older ones.
Listens on loopback by default; beyond loopback only with a key that the user chose. Ctrl-C and SIGTERM end it with
code 0; an engine that has failed permanently ends it with the cause.
"""

import argparse
import asyncio
import signal
import sys
from pathlib import Path

from areal.api.errors import EngineError
from areal.config.errors import ConfigError
from areal.config.keys import API_KEY_VARIABLE, find_key
from areal.config.rollout import GenerationHyperparameters, Kernel
from areal.proxy import Proxy
from areal.utils.net import is_loopback
from areal.viewer.playground import PLAYGROUND, WithPlayground

TURNS_KEPT = 10_000
"""Answers that the session remembers before it starts over."""


def run(args: argparse.Namespace) -> int:
    key = _key(args.api_key, args.api_key_file, args.host)
    from areal.engine.models import find_model

    directory = find_model(args.model, lambda text: print(text, file=sys.stderr))
    asyncio.run(_serve(args.model, directory, args.host, args.port, key, args.public_url, args.kernel))
    return 0


async def _serve(
    model: str, directory: Path, host: str, port: int, key: str | None, public_url: str, kernel: Kernel
) -> None:
    from areal.engine.inference.server import load_engine
    from areal.engine.models import max_positions
    from areal.utils.hf_utils import load_hf_processor, load_hf_tokenizer

    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    engine = load_engine(directory, kernel=kernel)
    engine.on_failure = stop.set
    proxy = Proxy(
        engine,
        load_hf_tokenizer(directory),
        gconfig=GenerationHyperparameters(),
        max_positions=max_positions(directory),
        processor=load_hf_processor(directory),
        model_name=model,
        public_url=public_url,
    )
    try:
        await proxy.start(host, port, exposed=True, around=lambda app: WithPlayground(app, model))
        session = proxy.open_session(api_key=key)
        session.turns_kept = TURNS_KEPT
        _announce(proxy.origin, model, session.api_key if key is None else None)
        await stop.wait()
    finally:
        await proxy.aclose()
        await engine.aclose()
    if engine.failure is not None:
        raise EngineError(engine.failure)


def _announce(origin: str, model: str, new_key: str | None) -> None:
    print(f"{model} is served at {origin}/v1 (Ctrl-C ends it)")
    if new_key is not None:
        print(f"api key: {new_key}")
    print(f"talk to it at {origin}{PLAYGROUND}" + (f"#{new_key}" if new_key is not None else ""))
    sys.stdout.flush()


def _key(given: str | None, path: str | None, host: str) -> str | None:
    """The key to use; None = one is to be made."""
    key = find_key(given, path, API_KEY_VARIABLE, "--api-key")
    if not key and not is_loopback(host):
        raise ConfigError(
            f"serving on {host}, beyond this machine, needs --api-key, --api-key-file or {API_KEY_VARIABLE}; choose one"
        )
    return key or None
