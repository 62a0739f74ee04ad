"""How an exception crosses a channel: errors of `areal.api.errors` as themselves, anything else as `RemoteError`."""

import traceback

from areal.api import errors
from areal.api.errors import ArealError


class RemoteError(ArealError):
    """A handler at the other end raised something that is not one of our errors."""

    def __init__(self, peer: str, type_name: str, text: str, remote_traceback: str) -> None:
        super().__init__(f"{peer}: {type_name}: {text}")
        self.type_name = type_name
        self.text = text
        self.remote_traceback = remote_traceback
        if remote_traceback:
            self.add_note(f"\nraised in {peer}:\n{remote_traceback}")


def dump_error(error: BaseException) -> list[str]:
    name = type(error).__name__
    if _known(name) is type(error):
        return [name, str(error), ""]
    return [name, str(error), "".join(traceback.format_exception(error))]


def load_error(peer: str, dumped: list[str]) -> ArealError:
    name, text, remote_traceback = dumped
    known = _known(name)
    if known is not None and not remote_traceback:
        return known(text)
    return RemoteError(peer, name, text, remote_traceback)


def _known(name: str) -> type[ArealError] | None:
    return getattr(errors, name) if name in errors.__all__ else None
