"""Load tokenizers in the one way this package relies on."""

from functools import partial
from pathlib import Path
from typing import Any


def load_hf_tokenizer(path: str | Path) -> Any:
    """A Hugging Face tokenizer whose `apply_chat_template(tokenize=True)` returns a plain list of ids.

    transformers 5 returns a BatchEncoding there, and `list()` of that is its keys.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(path))
    tokenizer.apply_chat_template = partial(tokenizer.apply_chat_template, return_dict=False)
    return tokenizer
