"""Frames: whatever happens to the bytes on their way, the reader gets what the writer sealed, or an error."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal.infra.rpc.frames import (
    LENGTH,
    MAC_BYTES,
    SHORT_BYTES,
    FrameError,
    HandshakeRefused,
    Opener,
    Seals,
    call,
    caller_proof,
    caller_seals,
    listener_proof,
    listener_seals,
)

NONCES = bytes(range(64))
contents = st.lists(st.binary(max_size=40), min_size=1, max_size=6)


def two_ends(secret: bytes = b"secret", nonces: bytes = NONCES) -> tuple[Seals, Seals]:
    return caller_seals(secret, nonces), listener_seals(secret, nonces)


def read(opener: Opener, data: bytes) -> list[bytes]:
    """What is read before the first error."""
    read: list[bytes] = []
    try:
        for byte in data:
            read += opener.feed(bytes([byte]))
    except FrameError:
        return read
    return read


def read_at_once(opener: Opener, data: bytes) -> list[bytes]:
    try:
        return opener.feed(data)
    except FrameError:
        return []


@given(contents, st.data())
def test_frames_come_back_however_the_stream_is_cut(sent: list[bytes], data: st.DataObject) -> None:
    (sealer, _), (_, opener) = two_ends()
    stream = b"".join(sealer.seal(content) for content in sent)
    received: list[bytes] = []
    while stream:
        cut = data.draw(st.integers(1, len(stream)))
        received += opener.feed(stream[:cut])
        stream = stream[cut:]
    assert received == sent
    assert opener.is_between_frames


@given(contents, st.data())
def test_altered_byte_is_never_read(sent: list[bytes], data: st.DataObject) -> None:
    (sealer, _), (_, opener) = two_ends()
    frames = [sealer.seal(content) for content in sent]
    stream = bytearray(b"".join(frames))
    at = data.draw(st.integers(0, len(stream) - 1))
    stream[at] ^= data.draw(st.integers(1, 255))
    whole = 0
    while sum(map(len, frames[: whole + 1])) <= at:
        whole += 1
    assert read(opener, bytes(stream)) == sent[:whole], "only the frames before the altered one"


@given(contents, st.data())
def test_repeated_missing_and_moved_frames_are_refused(sent: list[bytes], data: st.DataObject) -> None:
    (sealer, _), (_, opener) = two_ends()
    frames = [sealer.seal(content) for content in sent]
    order = data.draw(st.lists(st.integers(0, len(frames) - 1), max_size=8))
    in_place = next((place for place, number in enumerate(order) if number != place), len(order))
    assert read(opener, b"".join(frames[number] for number in order)) == sent[:in_place]


@given(contents, st.data())
def test_truncated_stream_gives_whole_frames_and_tells_that_one_is_cut(sent: list[bytes], data: st.DataObject) -> None:
    (sealer, _), (_, opener) = two_ends()
    frames = [sealer.seal(content) for content in sent]
    stream = b"".join(frames)
    cut = data.draw(st.integers(0, len(stream)))
    received = opener.feed(stream[:cut])
    assert received == sent[: len(received)]
    ends = {sum(map(len, frames[:count])) for count in range(len(frames) + 1)}
    assert opener.is_between_frames is (cut in ends)


def test_frames_of_another_secret_connection_or_direction_are_refused() -> None:
    (_, from_listener), (_, from_caller) = two_ends()
    ours, _ = two_ends()
    others = two_ends(b"other")[0], two_ends(nonces=bytes(64))[0], two_ends()[1]
    for sealer, _ in others:
        with pytest.raises(FrameError, match="altered"):
            listener_seals(b"secret", NONCES)[1].feed(sealer.seal(b"content"))
    with pytest.raises(FrameError, match="altered"):
        from_listener.feed(ours[0].seal(b"reflected to its sender"))
    assert from_caller.feed(caller_seals(b"secret", NONCES)[0].seal(b"content")) == [b"content"]


def test_oversized_frame_is_refused_at_its_announcement() -> None:
    opener = two_ends()[1][1]
    opener.max_bytes = 1000
    with pytest.raises(FrameError, match="at most 1000 bytes, the peer announced 1001"):
        opener.feed(LENGTH.pack(1001))


@pytest.mark.parametrize("size", [0, 1, SHORT_BYTES - 4, SHORT_BYTES, 1 << 20])
def test_every_byte_of_short_and_long_frames_is_covered(size: int) -> None:
    for at in {0, LENGTH.size + size // 2, LENGTH.size + size, LENGTH.size + size + MAC_BYTES - 1}:
        (sealer, _), (_, opener) = two_ends()
        frame = bytearray(sealer.seal(b"x" * size))
        frame[at] ^= 1
        assert read_at_once(opener, bytes(frame)) == []


def test_frame_costs_its_length_and_its_mac() -> None:
    assert len(two_ends()[0][0].seal(b"x" * 100)) == LENGTH.size + 100 + MAC_BYTES


class ScriptedListener:
    """The listener's half of a handshake with another secret, or with the right one."""

    def __init__(self, secret: bytes) -> None:
        self.secret = secret
        self.nonce = b"L" * 32
        self.received = b""

    def receive(self, size: int) -> bytes:
        return self.nonce if not self.received else listener_proof(self.secret, self.nonce + self.received[:32])

    def send(self, data: bytes) -> None:
        self.received = data


def test_blocking_caller_proves_the_secret_and_trusts_no_other_listener() -> None:
    right, wrong = ScriptedListener(b"secret"), ScriptedListener(b"other")
    sealer, _ = call(b"secret", right.receive, right.send)
    nonces = right.nonce + right.received[:32]
    assert right.received[32:] == caller_proof(b"secret", nonces)
    assert listener_seals(b"secret", nonces)[1].feed(sealer.seal(b"content")) == [b"content"]
    with pytest.raises(HandshakeRefused, match="it does not know the secret"):
        call(b"secret", wrong.receive, wrong.send)
