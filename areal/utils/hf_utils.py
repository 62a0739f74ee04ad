"""Load tokenizers in the one way this package relies on."""

import json
from functools import partial
from pathlib import Path
from typing import Any

PLAIN_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")
"""What a tokenizer that is nothing but its tokenizer.json calls itself; loading one as such needs no torch."""


def load_hf_tokenizer(path: str | Path) -> Any:
    """A Hugging Face tokenizer whose `apply_chat_template(tokenize=True)` returns a plain list of ids.

    transformers 5 returns a BatchEncoding there, and `list()` of that is its keys.
    """
    if _class_name(Path(path)) in PLAIN_CLASSES:
        from transformers import PreTrainedTokenizerFast as Loader
    else:
        from transformers import AutoTokenizer as Loader

    tokenizer = Loader.from_pretrained(str(path))
    tokenizer.apply_chat_template = partial(tokenizer.apply_chat_template, return_dict=False)
    return tokenizer


def _class_name(directory: Path) -> str:
    try:
        config = json.loads((directory / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return ""
    return str(config.get("tokenizer_class", "")) if (directory / "tokenizer.json").exists() else ""
