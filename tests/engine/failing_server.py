"""The engine server of a machine on which no step can be computed: `python failing_server.py MODEL_DIRECTORY`."""

import runpy
from typing import Any

from areal.engine.inference.decoder_runner import DecoderRunner


def forward(self: DecoderRunner, *args: Any) -> Any:
    raise RuntimeError("out of memory")


if __name__ == "__main__":
    DecoderRunner.forward = forward  # type: ignore[method-assign]
    runpy.run_module("areal.engine.inference.server", run_name="__main__", alter_sys=True)
