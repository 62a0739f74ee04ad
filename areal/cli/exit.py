"""How a program of ours ends: an error meant for the user is one line and code 2, Ctrl-C is 130.

Any other exception is a fault of the program and keeps its traceback.
"""

import os
import sys
import traceback
from collections.abc import Callable
from typing import ParamSpec

from areal.config.errors import ArealError

P = ParamSpec("P")

USER_ERROR = 2
INTERRUPTED = 130


def guard(main: Callable[P, int | None], *args: P.args, **kwargs: P.kwargs) -> int:
    """Call `main` and return the exit code, for `sys.exit(guard(main, sys.argv[1:]))`."""
    try:
        return main(*args, **kwargs) or 0
    except ArealError as error:
        if os.environ.get("AREAL_LOG", "").upper() == "DEBUG":
            traceback.print_exc()
        print(f"areal: {error}", file=sys.stderr)
        return USER_ERROR
    except KeyboardInterrupt:
        print("areal: interrupted", file=sys.stderr)
        return INTERRUPTED
