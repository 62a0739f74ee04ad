"""Keys that a user chooses: given as a setting, in a file, or in an environment variable.

A setting ends up on a command line, which every user of a machine can read; a file or a variable does not.
"""

import os
from pathlib import Path

from areal.config.errors import ConfigError

ADMIN_KEY_VARIABLE = "AREAL_ADMIN_KEY"
API_KEY_VARIABLE = "AREAL_API_KEY"
ENGINE_SECRET_VARIABLE = "AREAL_ENGINE_SECRET"


def find_key(given: str | None, path: str | None, variable: str, name: str) -> str:
    """The key that was given, else the one in the file, else the one in the variable; empty = there is none.

    `name` is what errors call it. Raises ConfigError for a key that does not fit a header.
    """
    if given is not None:
        return _checked(given, name)
    if path is not None:
        return _checked(_read(path, name), f"{name} in {path}")
    in_environment = os.environ.get(variable)
    return "" if in_environment is None else _checked(in_environment, f"{name} in {variable}")


def _read(path: str, name: str) -> str:
    try:
        return Path(path).expanduser().read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{name} must be in a file that can be read, got {path}: {error}") from None


def _checked(key: str, name: str) -> str:
    if not key.isascii() or not key.isprintable() or not key.strip() or " " in key:
        raise ConfigError(f"{name} must be visible ASCII characters without spaces, so that it fits a header")
    return key
