"""Tasks that `datasets` finds by itself: by an id, on the Hugging Face hub or in its cache, or in a directory.

`owner/name` or `directory`, with `:SUBSET` after it where there are several. Splits are those of the library, slices
(`train[:90%]`) included.
"""

import re
from collections.abc import Iterator
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
    except Exception as error:  # its readers of CSV, archives, images and YAML raise types of their own
        raise DatasetError(
            f"{found}, and `datasets` cannot load it: {_line(error)}; a subset is named as in {name}:SUBSET"
        ) from error


def load_saved(path: str) -> Any:
    """What `save_to_disk` left in a directory, a Dataset or a DatasetDict."""
    try:
        from datasets import load_from_disk
    except ImportError as error:
        raise DatasetError(missing(f"reading {path!r} needs datasets", error, "datasets")) from error
    try:
        return load_from_disk(path)
    except Exception as error:
        raise DatasetError(
            f"{path!r} looks like a saved Dataset, but `datasets` cannot load it: {_line(error)}; save it again"
        ) from error


def rows(dataset: Any, path: str) -> Iterator[dict[str, Any]]:
    """Those of a Dataset, some of which are only read now, such as images."""
    try:
        yield from map(dict, dataset)
    except Exception as error:
        raise DatasetError(f"`datasets` cannot read the rows of {path!r}: {_line(error)}; mend the file") from error


def _line(error: Exception) -> str:
    """With its cause, where there is one: by itself it may only say that something went wrong."""
    said = str(error) if error.__cause__ is None else f"{error}: {error.__cause__}"
    return " ".join(said.split())[:400].rstrip(".")
