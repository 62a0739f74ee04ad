"""Log lines for people: the time, the logger's name, the message. Every logger comes from `getLogger(name)`."""

import logging
import os
import sys

from areal.utils.shorten import printable

ROOT = "areal"


def getLogger(name: str = "") -> logging.Logger:  # noqa: N802  (the name users import)
    """A logger below this package's root logger, which is set up on first use to write to stderr at level AREAL_LOG."""
    root = logging.getLogger(ROOT)
    if not root.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(_PrintableFormatter("%(asctime)s %(name)s %(levelname).1s  %(message)s", "%H:%M:%S"))
        root.addHandler(handler)
        root.setLevel(os.environ.get("AREAL_LOG", "INFO").upper())
        root.propagate = False
    return root.getChild(name) if name else root


class _PrintableFormatter(logging.Formatter):
    """For terminals: the errors of agents may quote what a model said."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))
