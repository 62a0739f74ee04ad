"""Runs a program under an audit hook, where there are no namespaces.

It imports nothing of this package: its text goes to `-c`.

Arguments: the program's file, then the directories that it may read. It may write below its working directory. Every
audited action that is not listed here is refused: sockets, processes, signals, ctypes. This stops careless Python code;
it does not stop an attacker who brings machine code.
"""

import _posixsubprocess
import os
import sys

HARMLESS = (
    "array.__new__",
    "builtins.",
    "code.__new__",
    "compile",
    "cpython.run_",
    "exec",
    "glob.",
    "marshal.",
    "object.",
    "os.listdir",
    "os.putenv",
    "os.scandir",
    "os.unsetenv",
    "os.walk",
    "pathlib.",
    "pickle.",
    "sys._getframe",
    "sys.excepthook",
    "sys.set",
    "sys.unraisablehook",
    "tempfile.",
    "time.sleep",
    "_thread.",
)
"""Prefixes of events that touch nothing outside the interpreter."""
FILES = ("os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.truncate", "shutil.")
MODULES = {"ctypes", "_ctypes", "_testcapi", "_xxsubinterpreters", "_interpreters"}
"""Modules that lead to native code and around this hook."""


def main() -> None:
    program, *readable = sys.argv[1:]
    del sys.argv[0], sys.argv[1:]
    with open(program, encoding="utf-8") as file:
        code = compile(file.read(), program, "exec")
    _posixsubprocess.fork_exec = _refused  # type: ignore[assignment]  # raises no event, and asyncio imports it
    refuse_all_but(readable, os.getcwd())
    module = type(sys)("__main__")
    module.__file__ = program
    sys.modules["__main__"] = module
    exec(code, module.__dict__)


def refuse_all_but(readable: list[str], scratch: str) -> None:
    def hook(event: str, arguments: tuple[object, ...]) -> None:
        if event == "open":
            path, _, flags = arguments
            allowed = isinstance(path, int) or _below(path, [scratch] if _writes(flags) else [scratch, *readable])
        elif event == "import":
            allowed = arguments[0] not in MODULES
        elif event.startswith(FILES):
            allowed = all(_below(each, [scratch]) for each in arguments if isinstance(each, str | bytes))
        else:
            allowed = event.startswith(HARMLESS)
        if not allowed:
            raise PermissionError(f"the sandbox refuses {event}")

    sys.addaudithook(hook)


def _refused(*_: object) -> None:
    raise PermissionError("the sandbox refuses processes")


def _writes(flags: object) -> bool:
    return isinstance(flags, int) and bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC))


def _below(path: object, directories: list[str]) -> bool:
    real = os.path.realpath(os.fsdecode(path))  # type: ignore[arg-type]
    return any(real == each or real.startswith(each.rstrip("/") + "/") for each in directories)


if __name__ == "__main__":
    main()
