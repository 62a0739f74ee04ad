"""`areal merge DIR OUT`: make an ordinary model of an adapter and the model that it belongs to.

DIR is a directory with an adapter of PEFT's format, such as a checkpoint of a run with `actor.lora`.
"""

import argparse
from pathlib import Path

from areal.api.errors import ModelError


def run(args: argparse.Namespace) -> int:
    directory, out = Path(args.adapter).expanduser(), Path(args.merged).expanduser()
    if out.exists() and any(out.iterdir()):
        raise ModelError(f"{str(out)!r} must be a new directory, it has files; name another")
    from areal.engine.model.adapter import is_adapter
    from areal.engine.models import merge_adapter, tokenizer_files
    from areal.utils.hf_utils import load_hf_tokenizer

    if not is_adapter(directory):
        raise ModelError(f"{str(directory)!r} must have an adapter_config.json and no config.json; it holds no adapter")
    merge_adapter(directory, out)
    load_hf_tokenizer(tokenizer_files(directory)).save_pretrained(out)
    print(out)
    return 0
