"""Frames between a pool and its workers."""

import socket
import struct
import time
from collections.abc import Iterator

import pytest

from areal.utils.process_pool.channel import PoolChannel, PoolChannelClosed, PoolFrame


@pytest.fixture
def ends() -> Iterator[tuple[PoolChannel, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield PoolChannel(ours), theirs


def test_frame_that_arrives_in_pieces_survives_waits_that_gave_up(ends: tuple[PoolChannel, socket.socket]) -> None:
    channel, other = ends
    frame = struct.pack("!BQ", PoolFrame.RESULT, 6) + b"result"
    for piece in (frame[:4], frame[4:11], frame[11:]):
        with pytest.raises(TimeoutError):
            channel.receive(deadline=time.monotonic())
        other.sendall(piece)
    assert channel.receive(deadline=time.monotonic()) == (PoolFrame.RESULT, b"result")


def test_frames_before_the_other_ends_death_are_still_read(ends: tuple[PoolChannel, socket.socket]) -> None:
    channel, other = ends
    sender = PoolChannel(other)
    sender.send(PoolFrame.RESULT, b"a")
    sender.send(PoolFrame.FAILED, b"b")
    sender.close()
    assert [channel.receive(), channel.receive()] == [(PoolFrame.RESULT, b"a"), (PoolFrame.FAILED, b"b")]
    with pytest.raises(PoolChannelClosed):
        channel.receive()


def test_frame_that_is_not_taken_is_given_up_at_the_deadline(ends: tuple[PoolChannel, socket.socket]) -> None:
    channel, _ = ends
    with pytest.raises(TimeoutError):
        channel.send(PoolFrame.CALLS, bytes(1 << 24), deadline=time.monotonic() + 0.01)
