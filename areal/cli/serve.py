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
from urllib.parse import urlsplit

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from areal.api.errors import EngineError
from areal.config.errors import ConfigError
from areal.config.keys import API_KEY_VARIABLE, find_key
from areal.config.rollout import GenerationHyperparameters
from areal.proxy import Proxy
from areal.trainer.display import Announcer, waiting
from areal.utils.net import is_loopback
from areal.viewer.playground import PLAYGROUND, WithPlayground

KEY_REMEDY = (
    "send the key that `areal serve` printed, or the one that it was given by --api-key, --api-key-file or "
    f'{API_KEY_VARIABLE}: OpenAI(base_url="http://HOST:PORT/v1", api_key=KEY)'
)
CORS_METHODS = ["GET", "POST", "DELETE"]
REQUEST_ID_HEADERS = ["x-request-id", "request-id"]
TURNS_KEPT = 10_000
"""Answers that the session remembers before it starts over."""


def run(args: argparse.Namespace) -> int:
    key = _key(args.api_key, args.api_key_file, args.host)
    origins = [_origin(each) for each in args.cors_origin]
    with waiting("loading torch"):
        from areal.engine.models import find_model
    with Announcer() as report:
        directory = find_model(args.model, report)
    asyncio.run(_serve(args, directory, key, origins))
    return 0


async def _serve(args: argparse.Namespace, directory: Path, key: str | None, origins: list[str]) -> None:
    from areal.engine.inference.server import load_engine
    from areal.engine.models import max_positions, tokenizer_files
    from areal.utils.hf_utils import load_hf_processor, load_hf_tokenizer

    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    positions, files = max_positions(directory), tokenizer_files(directory)
    with waiting(f"loading {args.model}"):
        engine = load_engine(directory, kernel=args.kernel)
        tokenizer, processor = load_hf_tokenizer(files), load_hf_processor(files)
    engine.on_failure = stop.set
    proxy = Proxy(
        engine,
        tokenizer,
        gconfig=GenerationHyperparameters(max_new_tokens=positions),  # what is left of the context, that is
        max_positions=positions,
        processor=processor,
        model_name=args.model,
        public_url=args.public_url,
        trained=False,
        strict_model=args.strict_model,
        key_remedy=KEY_REMEDY,
    )
    try:
        await proxy.start(args.host, args.port, exposed=True, around=lambda app: _around(app, args.model, origins))
        session = proxy.open_session(api_key=key)
        session.turns_kept = TURNS_KEPT
        _announce(proxy.origin, args.model, session.api_key if key is None else None)
        await stop.wait()
    finally:
        await proxy.aclose()
        await engine.aclose()
    if engine.failure is not None:
        raise EngineError(engine.failure)


def _around(app: ASGIApp, model: str, origins: list[str]) -> ASGIApp:
    """The app with its page; pages of `origins` may call it too."""
    app = WithPlayground(app, model)
    if not origins:
        return app
    return CORSMiddleware(
        app, allow_origins=origins, allow_methods=CORS_METHODS, allow_headers=["*"], expose_headers=REQUEST_ID_HEADERS
    )


def _origin(text: str) -> str:
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.netloc or f"{parts.scheme}://{parts.netloc}" != text:
        raise ConfigError(f"--cors-origin must be like https://example.org or http://localhost:3000, got {text!r}")
    return text


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
