"""The root of every error that `areal` raises on purpose, and the one for settings.

ArealError
└── ConfigError        a setting is wrong: says the rule, the value, the remedy

`areal.api.errors` has the rest of the tree.
"""


class ArealError(Exception):
    """Anything that `areal` raises on purpose; its text is meant for the user and needs no traceback."""


class ConfigError(ArealError, ValueError):
    """A setting, or a combination of settings, that makes no sense."""


def require(condition: bool, message: str) -> None:
    """Raise `ConfigError(message)` unless `condition` holds.

    The message of a dataclass begins with the field's own name; the loader puts the section's name before it.
    """
    if not condition:
        raise ConfigError(message)
