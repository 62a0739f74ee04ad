"""Tasks that `datasets` finds by itself: by an id, on the Hugging Face hub or in its cache, or in a directory.

`owner/name` or `directory`, with `:SUBSET` after it where there are several. Splits are those of the library, slices
(`train[:90%]`) included.
"""

import re
from pathlib import Path
from typing import Any

from areal.api.errors import DatasetError
from areal.utils.installing import missing

_HUB_ID = re.compile(r"\w[\w.-]*/[\w.-]+(:[\w.-]+)?")
_FILE = re.compile(r"\.(jsonl?|parquet|csv)$")


def is_hub_id(path: str) -> bool:
    """Whether `path`, where nothing lies, may be an id: one slash, and no file's name that is mistyped."""
    return _HUB_ID.fullmatch(path) is not None and _FILE.search(path) is None


def load(path: str, split: str | None = None) -> Any:
    """The DatasetDict at a hub id or in a directory; with a split, or a slice of one, that Dataset."""
    name, _, subset = path.partition(":")
    found = f"{path!r} holds no .jsonl or .parquet file" if Path(path).is_dir() else f"there is no file {path!r}"
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise DatasetError(missing(f"{found}; anything else needs datasets", error, "datasets")) from error
    try:
        return load_dataset(name, subset or None, split=split)
    except ConnectionError as error:
        raise DatasetError(
            f"{found}, and the hub that may have it as an id cannot be reached ({_line(error)}), nor is it in the "
            "cache; fetch it where there is a network (HF_HOME names the cache), or name a directory"
        ) from error
    except (ValueError, OSError) as error:  # what `datasets` raises for what it was asked for
        raise DatasetError(
            f"{found}, and `datasets` cannot load it: {_line(error)}; a subset is named as in {name}:SUBSET"
        ) from error


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:400].rstrip(".")
