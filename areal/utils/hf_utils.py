"""Load tokenizers and processors in the one way this package relies on.

Those of the built-in models are files of this package (`builtin_tokenizers/`), there before the models are made.
"""

import json
from functools import partial
from pathlib import Path
from typing import Any

from areal.utils.shipped_tokenizer import SHIPPED, ShippedTokenizer, shipped_name
from areal.utils.shorten import first_line

PLAIN_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")
"""Class names of tokenizers that are nothing but their tokenizer.json, which can be loaded without torch."""
PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json")


def load_hf_tokenizer(path: str | Path) -> Any:
    """A Hugging Face tokenizer whose `apply_chat_template(tokenize=True)` returns a plain list of ids.

    `path` is a directory, a Hugging Face id, or the name of a built-in model, whose tokenizer loads transformers only
    when it is asked for something unusual. transformers 5 returns a BatchEncoding where we return a list, and `list()`
    of that is its keys.
    """
    path = tokenizer_directory(path)
    if name := shipped_name(Path(path)):
        return ShippedTokenizer(name, str(path))
    if _class_name(Path(path)) in PLAIN_CLASSES:
        from transformers import PreTrainedTokenizerFast as Loader
    else:
        from transformers import AutoTokenizer as Loader

    return _listing_ids(Loader.from_pretrained(str(path)))


def load_hf_processor(path: str | Path) -> Any:
    """The processor of a model that sees images, its tokenizer as above; None if the directory has none.

    Needs Pillow and, because transformers' processors do, torch; torchvision only for those that require it.
    """
    path = tokenizer_directory(path)
    if not any((Path(path) / name).is_file() for name in PROCESSOR_FILES):
        return None
    from transformers import AutoProcessor

    try:
        processor = AutoProcessor.from_pretrained(str(path))
    except Exception as error:  # a missing package comes as whatever the processor's authors let through
        raise ValueError(
            f"the processor in {path} cannot be loaded: {type(error).__name__}: {first_line(error)}; install what it "
            f"names (processors for video need torchvision), or remove {' and '.join(PROCESSOR_FILES)} to go without "
            "images"
        ) from error
    if getattr(processor, "image_processor", None) is None or getattr(processor, "tokenizer", None) is None:
        return None  # of another kind: a tokenizer alone, or one for audio
    _listing_ids(processor.tokenizer)
    return processor


def tokenizer_directory(path: str | Path) -> str | Path:
    """`path`, or if it is the name of a built-in model, where the files of its tokenizer and processor are."""
    if not str(path).startswith("builtin:"):
        return path
    name, known = str(path).removeprefix("builtin:"), sorted(each.name for each in SHIPPED.iterdir())
    if name not in known:
        raise ValueError(f"no built-in model {name!r}; use one of {', '.join(f'builtin:{each}' for each in known)}")
    return SHIPPED / name


def _listing_ids(tokenizer: Any) -> Any:
    tokenizer.apply_chat_template = partial(tokenizer.apply_chat_template, return_dict=False)
    return tokenizer


def _class_name(directory: Path) -> str:
    try:
        config = json.loads((directory / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return ""
    return str(config.get("tokenizer_class", "")) if (directory / "tokenizer.json").exists() else ""
