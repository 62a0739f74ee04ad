"""What a call must not leave behind for the next one in the same process: recorded before it, put back after it.

That is what belongs to the process and not to the user's modules: the environment, the working directory, the file
mode mask, limits, timers, signals, and the names in the modules that everybody uses. What modules keep for themselves
(caches, random generators, threads) stays; processes are reused for the sake of it.

Comparing everything takes longer than a small call. So after each call what is most often changed is looked at, and the
rest only if some of that was changed, if the call failed or imported something, and after the last of the calls that
were sent together, which are all of one function.

This module holds on to the functions it needs, since a call may take them from their modules.
"""

import os
import resource
import signal
import sys

# The functions of `signal` without their conversion to enums, which costs as much as all the rest.
from _signal import getsignal as handler_of  # type: ignore[import-not-found]
from _signal import pthread_sigmask as mask_signals
from _signal import signal as set_handler
from os import chdir, getcwd, umask
from resource import getrlimit, setrlimit
from signal import SIG_BLOCK, SIG_SETMASK, setitimer
from sys import getrecursionlimit, setrecursionlimit
from types import ModuleType
from typing import Any

_GUARDED = ("builtins", "sys", "os", "posixpath", "time", "random", "shutil", "subprocess")
"""Modules whose names are put back, builtins first; what else a call replaces in a module stays replaced."""
_LIMITS = (resource.RLIMIT_DATA, resource.RLIMIT_AS, resource.RLIMIT_STACK, resource.RLIMIT_NOFILE)
_SIGNALS = tuple(
    int(getattr(signal, f"SIG{name}"))
    for name in ("HUP", "INT", "QUIT", "TERM", "CHLD", "PIPE", "USR1", "USR2", "XCPU", "ALRM", "VTALRM", "PROF")
)
_DEFAULT = int(signal.SIG_DFL)
_REAL_TIMER = signal.ITIMER_REAL
_RARE_TIMERS = ((signal.ITIMER_VIRTUAL, signal.SIGVTALRM), (signal.ITIMER_PROF, signal.SIGPROF))


class ProcessState:
    """The state that `restore` returns to: that of the last `record`."""

    def __init__(self) -> None:
        self.record()

    def record(self) -> None:
        self._modules = dict(sys.modules)
        self._namespaces = [_Namespace(module) for name in _GUARDED if (module := sys.modules.get(name)) is not None]
        lists: tuple[list[Any], ...] = (sys.path, sys.meta_path, sys.path_hooks, sys.argv)
        self._lists = [(each, list(each)) for each in lists]
        self._variables: dict[bytes, bytes] = _variables()
        self._directory = _directory()
        self._mask = umask(0)
        umask(self._mask)
        self._handlers = [handler_of(number) for number in _SIGNALS]
        self._blocked = mask_signals(SIG_BLOCK, ())
        self._limits = [getrlimit(limit) for limit in _LIMITS]
        self._recursion_limit = getrecursionlimit()
        self._known = len(sys.modules)

    def record_imports(self) -> None:
        """`record` if modules were imported since: their settings are meant to last."""
        if len(sys.modules) != self._known:
            self.record()

    def restore(self) -> None:
        """After a call that returned. Raises what `restore_all` raises."""
        self._stop_timers()  # while the handlers are still those of their call
        umask(self._mask)
        mask_signals(SIG_SETMASK, self._blocked)
        if self._is_changed():
            self.restore_all()

    def restore_all(self) -> None:
        """Raises OSError or ValueError if something cannot be put back, a hard limit for example."""
        self._stop_timers()
        umask(self._mask)
        mask_signals(SIG_SETMASK, self._blocked)
        # First, because the rest needs what is in there.
        for namespace in self._namespaces:
            namespace.restore()
        self._restore_modules()
        for each, items in self._lists:
            if each != items:
                each[:] = items
        if _variables() != self._variables:
            _set_variables(self._variables)
        if _directory() != self._directory and self._directory is not None:
            chdir(self._directory)
        for number, handler in zip(_SIGNALS, self._handlers, strict=True):
            if handler_of(number) is not handler and handler is not None:  # None = not set from Python
                set_handler(number, handler)
        for limit, values in zip(_LIMITS, self._limits, strict=True):
            if getrlimit(limit) != values:
                setrlimit(limit, values)
        setrecursionlimit(self._recursion_limit)
        self.record_imports()

    def _is_changed(self) -> bool:
        return (
            len(sys.modules) != self._known
            or self._namespaces[0].is_changed()  # builtins
            or _variables() != self._variables
            or _directory() != self._directory
            or [handler_of(number) for number in _SIGNALS] != self._handlers
            or getrecursionlimit() != self._recursion_limit
        )

    def _stop_timers(self) -> None:
        setitimer(_REAL_TIMER, 0)
        for timer, number in _RARE_TIMERS:
            if handler_of(number) != _DEFAULT:
                setitimer(timer, 0)

    def _restore_modules(self) -> None:
        """Modules that were there are there again, and none is blocked; new ones stay, as some load only once."""
        if sys.modules == self._modules:
            return
        for name, module in self._modules.items():
            if sys.modules.get(name) is not module:
                sys.modules[name] = module
        for name in [name for name, module in sys.modules.items() if module is None and name not in self._modules]:
            del sys.modules[name]


class _Namespace:
    """The names of a module."""

    def __init__(self, module: ModuleType) -> None:
        self._names: dict[str, Any] = vars(module)
        self._before = dict(self._names)
        self._values = [*self._before.values()]

    def is_changed(self) -> bool:
        # Lists are compared faster than dicts; the order of names changes only if some are deleted.
        return [*self._names.values()] != self._values

    def restore(self) -> None:
        if not self.is_changed():
            return
        self._names.update(self._before)
        for name in self._names.keys() - self._before.keys():
            del self._names[name]
        self._values = [*self._names.values()]


_ENVIRONMENT = os.environ


def _variables() -> dict[bytes, bytes]:
    # As they are kept: decoding them for each call would cost more than all the rest.
    return dict(vars(_ENVIRONMENT)["_data"])


def _set_variables(wanted: dict[bytes, bytes]) -> None:
    for name in _variables().keys() - wanted.keys():
        del os.environb[name]
    for name, value in wanted.items():
        if os.environb.get(name) != value:
            os.environb[name] = value


def _directory() -> str | None:
    """None = it was deleted."""
    try:
        return getcwd()
    except FileNotFoundError:
        return None
