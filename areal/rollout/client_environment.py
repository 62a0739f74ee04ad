"""Where SDK clients that are told no address find one: the process's environment variables."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from areal.utils.loopback import bypass_proxies


def client_environment(base_url: str, api_key: str) -> dict[str, str]:
    """The variables by which every SDK reaches one session; `base_url` ends in /v1."""
    return {
        "OPENAI_BASE_URL": base_url,
        "OPENAI_API_BASE": base_url,  # the older name, which some frameworks prefer
        "OPENAI_API_KEY": api_key,
        "ANTHROPIC_BASE_URL": base_url.removesuffix("/v1"),  # that SDK adds it itself
        "ANTHROPIC_API_KEY": api_key,
        **bypass_proxies(os.environ),
    }


@contextmanager
def environment(values: Mapping[str, str]) -> Iterator[None]:
    """This process's variables are `values` and what they were before, afterwards only what they were."""
    before = {name: os.environ[name] for name in values if name in os.environ}
    os.environ.update(values)
    try:
        yield
    finally:
        for name in values:
            os.environ.pop(name, None)
        os.environ.update(before)
