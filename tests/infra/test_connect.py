import asyncio
import os
import socket
import stat
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

from areal.api.errors import ArealError
from areal.infra.rpc import frames
from areal.infra.rpc.channel import Channel, ChannelClosed
from areal.infra.rpc.connect import Listener, connect, serve
from areal.infra.rpc.sockets import MOST_STRANGERS, Door, address_towards, dial, listen
from areal.infra.rpc.wire import api_wire


async def serve_one(stack: AsyncExitStack, address: str, **options: Any) -> Listener:
    def on_channel(channel: Channel) -> None:
        channel.handlers["one"] = lambda: 1

    listener = await serve(address, on_channel, wire=api_wire(), **options)
    stack.push_async_callback(listener.close)
    return listener


async def test_tcp_port_zero_takes_a_free_port_that_the_address_names(stack: AsyncExitStack) -> None:
    listener = await serve_one(stack, "tcp:127.0.0.1:0")
    assert not listener.address.endswith(":0")
    channel = await connect(listener.address, wire=api_wire())
    assert await channel.call("one", timeout_seconds=10) == 1
    await channel.close()


async def test_unix_socket_is_private_and_removed_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "s"
    async with AsyncExitStack() as stack:
        await serve_one(stack, f"unix:{path}")
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert not os.path.exists(path)  # noqa: ASYNC240


async def test_right_secret_is_let_in_and_wrong_ones_are_not(stack: AsyncExitStack) -> None:
    listener = await serve_one(stack, "tcp:127.0.0.1:0", secret=b"right")
    for wrong in (b"wrong", b""):
        with pytest.raises(ChannelClosed, match="it disconnected during the handshake"):
            await connect(listener.address, wire=api_wire(), peer="the driver", secret=wrong)
    assert listener.channels == set()
    channel = await connect(listener.address, wire=api_wire(), secret=b"right")
    assert await channel.call("one", timeout_seconds=10) == 1
    await channel.close()


async def test_each_secret_of_a_listener_gives_its_peer_a_role(stack: AsyncExitStack) -> None:
    reader = frames.role_secret(b"right", "read")
    listener = await serve_one(stack, "tcp:127.0.0.1:0", secret=b"right", roles={"read": reader})
    for secret, role in ((b"right", ""), (reader, "read")):
        channel = await connect(listener.address, wire=api_wire(), secret=secret)
        assert await channel.call("one", timeout_seconds=10) == 1
        assert [each.role for each in listener.channels] == [role]
        await channel.close()
        await asyncio.gather(*(each.closed for each in list(listener.channels)))
    for wrong in (b"", frames.role_secret(b"right", "write"), frames.role_secret(reader, "read")):
        with pytest.raises(ChannelClosed, match="it disconnected during the handshake"):
            await connect(listener.address, wire=api_wire(), secret=wrong)


async def test_listener_that_does_not_know_the_secret_is_not_trusted(stack: AsyncExitStack) -> None:
    async def pretend(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"n" * 32)
        await reader.readexactly(64)
        writer.write(b"m" * 32)
        writer.close()

    server = await asyncio.start_server(pretend, "127.0.0.1", 0)
    stack.callback(server.close)
    port = server.sockets[0].getsockname()[1]
    with pytest.raises(ChannelClosed, match="it does not know the secret"):
        await connect(f"tcp:127.0.0.1:{port}", wire=api_wire(), secret=b"right")


async def test_silent_caller_is_cut_off_at_the_deadline(stack: AsyncExitStack) -> None:
    listener = await serve_one(stack, "tcp:127.0.0.1:0", handshake_seconds=0.05)
    reader, writer = await asyncio.open_connection("127.0.0.1", int(listener.address.rsplit(":", 1)[1]))
    assert len(await asyncio.wait_for(reader.read(), 10)) == 32  # the nonce, then the end
    writer.close()


async def test_strangers_who_say_nothing_leave_room_for_those_who_know_the_secret(
    stack: AsyncExitStack, log_lines: list[str]
) -> None:
    listener = await serve_one(stack, "tcp:127.0.0.1:0", secret=b"right", handshake_seconds=600)
    port, more = int(listener.address.rsplit(":", 1)[1]), 20
    strangers = []
    for _ in range(MOST_STRANGERS + more):
        strangers.append(await asyncio.open_connection("127.0.0.1", port))
        await asyncio.wait_for(strangers[-1][0].readexactly(32), 10)
    for reader, _ in strangers[:more]:
        assert await asyncio.wait_for(reader.read(), 10) == b""
    channel = await connect(listener.address, wire=api_wire(), secret=b"right")
    assert await channel.call("one", timeout_seconds=10) == 1
    assert not strangers[-1][0].at_eof()
    assert len([line for line in log_lines if "refused a connection" in line]) == 1
    await channel.close()
    for _, writer in strangers:
        writer.close()


async def test_caller_who_gives_up_waiting_is_not_said_to_be_refused(log_lines: list[str]) -> None:
    """As `areal status` does with a driver that is stopped for a while."""
    caller_left, closed, door = asyncio.Event(), asyncio.Event(), Door("the run", b"right")

    async def answer_late(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.wait_for(caller_left.wait(), 10)
        assert await door.admit(reader, writer) is None
        closed.set()

    server = await asyncio.start_server(answer_late, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    with pytest.raises(ChannelClosed, match="did not answer"):
        await connect(f"tcp:127.0.0.1:{port}", wire=api_wire(), secret=b"right", timeout_seconds=0.05)
    caller_left.set()
    await asyncio.wait_for(closed.wait(), 10)
    server.close()
    assert log_lines == []


async def test_silent_listener_is_given_up_at_the_deadline(stack: AsyncExitStack) -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    stack.callback(server.close)
    port = server.sockets[0].getsockname()[1]
    with pytest.raises(ChannelClosed, match=r"the engine at tcp:\S+ did not answer within 0.05 s"):
        await connect(f"tcp:127.0.0.1:{port}", wire=api_wire(), peer="the engine", timeout_seconds=0.05)


async def test_address_that_nothing_serves_is_reported_with_the_name(tmp_path: Path) -> None:
    with pytest.raises(ChannelClosed, match=r"cannot connect to the engine at unix:.*No such file"):
        await connect(f"unix:{tmp_path}/s", wire=api_wire(), peer="the engine")


@pytest.mark.parametrize("address", ["http://x", "tcp:127.0.0.1", "tcp:127.0.0.1:x", "unix:"])
async def test_malformed_address_is_refused_with_the_rule(address: str) -> None:
    with pytest.raises(ArealError, match="must"):
        await connect(address, wire=api_wire())


async def test_unix_path_that_is_too_long_is_refused_with_the_remedy() -> None:
    with pytest.raises(ArealError, match=r"1 to 107 bytes, got 201.*shorter name"):
        await connect("unix:/" + "x" * 200, wire=api_wire())


class Relay:
    """Sits between a caller and a listener. After the handshake it passes the caller's bytes through `tamper`."""

    def __init__(self, target: str, tamper: Callable[[list[bytes]], list[bytes] | None]) -> None:
        """`tamper` gets the caller's writes so far, and says what to send for the last; None = close the connection."""
        self._target = target
        self._tamper = tamper

    async def open(self, stack: AsyncExitStack) -> str:
        server = await asyncio.start_server(self._relay, "127.0.0.1", 0)
        stack.callback(server.close)
        return f"tcp:127.0.0.1:{server.sockets[0].getsockname()[1]}"

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, port = self._target.removeprefix("tcp:").split(":")
        their_reader, their_writer = await asyncio.open_connection(host, int(port))
        back = asyncio.ensure_future(self._copy(their_reader, writer))
        their_writer.write(await reader.readexactly(64))
        writes: list[bytes] = []
        while chunk := await reader.read(1 << 16):
            writes.append(chunk)
            if (altered := self._tamper(writes)) is None:
                break
            their_writer.write(b"".join(altered))
        their_writer.close()
        await back

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while chunk := await reader.read(1 << 16):
            writer.write(chunk)
        writer.close()


def flip_a_bit(writes: list[bytes]) -> list[bytes]:
    return [writes[-1]] if len(writes) < 3 else [writes[-1][:-20], bytes([writes[-1][-20] ^ 1]), writes[-1][-19:]]


def repeat(writes: list[bytes]) -> list[bytes]:
    return [writes[-1]] if len(writes) < 3 else [writes[-1], writes[-1]]


def repeat_an_old_one(writes: list[bytes]) -> list[bytes]:
    return [writes[-1]] if len(writes) < 3 else [writes[0]]


def reorder(writes: list[bytes]) -> list[bytes]:
    return [writes[-1], writes[-2]] if len(writes) == 3 else [] if len(writes) == 2 else [writes[-1]]


def truncate(writes: list[bytes]) -> list[bytes] | None:
    return [writes[-1]] if len(writes) < 3 else [writes[-1][:-1]] if len(writes) == 3 else None


@pytest.mark.parametrize("tamper", [flip_a_bit, repeat, repeat_an_old_one, reorder, truncate])
async def test_frame_that_was_tampered_with_is_not_acted_on_and_ends_the_channel(
    stack: AsyncExitStack, tamper: Callable[[list[bytes]], list[bytes]]
) -> None:
    paid: list[int] = []
    accepted: asyncio.Future[Channel] = asyncio.get_running_loop().create_future()

    def on_channel(channel: Channel) -> None:
        channel.handlers["pay"] = paid.append
        accepted.set_result(channel)

    listener = await serve("tcp:127.0.0.1:0", on_channel, wire=api_wire(), secret=b"right")
    stack.push_async_callback(listener.close)
    caller = await connect(await Relay(listener.address, tamper).open(stack), wire=api_wire(), secret=b"right")
    stack.push_async_callback(caller.close)
    channel = await asyncio.wait_for(accepted, 10)
    for amount in (1, 2, 3, 4):
        with suppress(ChannelClosed, TimeoutError):
            await caller.call("pay", amount, timeout_seconds=0.2)
    assert "FrameError" in await asyncio.wait_for(channel.closed, 10)
    assert paid in ([1, 2], [1, 2, 3], [1])  # whatever came whole and in its place


class SocketToAnotherHost:
    """Takes options like a connected socket, and says that its peer is elsewhere."""

    def __init__(self) -> None:
        self.options: dict[int, int] = {}

    def getsockname(self) -> tuple[str, int]:
        return "10.0.0.1", 1

    def getpeername(self) -> tuple[str, int]:
        return "10.0.0.2", 2

    def setsockopt(self, level: int, option: int, value: int) -> None:
        self.options[option] = value


def test_connection_to_another_host_notices_within_seconds_that_it_is_gone() -> None:
    connection = SocketToAnotherHost()
    frames.notice_loss(connection)  # type: ignore[arg-type]
    options = connection.options
    assert options[socket.SO_KEEPALIVE] == 1
    unanswered = options[socket.TCP_KEEPIDLE] + options[socket.TCP_KEEPINTVL] * options[socket.TCP_KEEPCNT]
    assert unanswered <= 8
    assert 0 < options[socket.TCP_USER_TIMEOUT] <= 8000


def test_address_towards_a_host_is_of_the_interface_that_reaches_it() -> None:
    assert address_towards("127.0.0.1") == "127.0.0.1"
    with pytest.raises(ArealError, match=r"a route to 'no\.such\.host\.invalid'.*scheduler\.address"):
        address_towards("no.such.host.invalid")


async def test_peer_on_this_machine_may_leave_everything_unread_for_as_long_as_it_likes(
    stack: AsyncExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A driver that is stopped for a while, by a debugger or Ctrl-Z, must find its processes alive."""
    monkeypatch.setattr(frames, "LOST_SECONDS", 3)
    connected: asyncio.Future[asyncio.StreamWriter] = asyncio.get_running_loop().create_future()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connected.set_result(writer)

    server, address = await listen("tcp:127.0.0.1:0", accept)
    stack.callback(server.close)
    reader, writer = await dial(address)
    stack.callback(writer.close)
    stack.callback((await connected).close)
    writer.write(b"x" * (64 << 20))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(reader.read(1), 9)
    assert not writer.is_closing()
