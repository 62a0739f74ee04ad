"""The root of every error this package raises on purpose, and the one the config room needs.

ArealError
└── ConfigError        a setting is wrong: says the rule, the value, the remedy

`areal.api.errors` draws the rest of the tree.
"""


class ArealError(Exception):
    """Anything this package raises on purpose; its text is meant for the user and needs no traceback."""


class ConfigError(ArealError, ValueError):
    """A setting, or a combination of settings, that means nothing."""


def require(condition: bool, message: str) -> None:
    """Raise `ConfigError(message)` unless `condition` holds.

    A dataclass's message opens with the field's own name; the loader puts the section's name before it.
    """
    if not condition:
        raise ConfigError(message)
