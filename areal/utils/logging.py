"""Log lines a person reads: time, who, what. `getLogger(name)` is the only door."""

import logging
import os
import sys

ROOT = "areal"


def getLogger(name: str = "") -> logging.Logger:  # noqa: N802  (the name users import)
    """A logger below this package's own root, which writes to stderr once configured on first use."""
    root = logging.getLogger(ROOT)
    if not root.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(levelname).1s  %(message)s", "%H:%M:%S"))
        root.addHandler(handler)
        root.setLevel(os.environ.get("AREAL_LOG", "INFO").upper())
        root.propagate = False
    return root.getChild(name) if name else root
