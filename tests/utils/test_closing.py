"""What is used in a `with` block is closed at its end."""

import pytest

from areal.utils.closing import Closing


class Handle(Closing):
    def __init__(self) -> None:
        self.closed = False

    def close(self) -> None:
        self.closed = True


def test_block_gets_the_object_itself_and_closes_it() -> None:
    with Handle() as handle:
        assert not handle.closed
    assert handle.closed


def test_object_is_closed_when_the_block_raises_and_the_error_passes() -> None:
    handle = Handle()
    with pytest.raises(KeyError), handle:
        raise KeyError("inside")
    assert handle.closed


def test_class_without_close_cannot_be_made() -> None:
    class Open(Closing):
        pass

    with pytest.raises(TypeError, match="close"):
        Open()  # type: ignore[abstract]
