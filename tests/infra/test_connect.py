import asyncio
import os
import stat
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from areal.api.errors import ArealError
from areal.infra.rpc.channel import Channel, ChannelClosed
from areal.infra.rpc.connect import Listener, connect, serve
from areal.infra.rpc.wire import api_wire


async def listen(stack: AsyncExitStack, address: str, **options: Any) -> Listener:
    def on_channel(channel: Channel) -> None:
        channel.handlers["one"] = lambda: 1

    listener = await serve(address, on_channel, wire=api_wire(), **options)
    stack.push_async_callback(listener.close)
    return listener


async def test_tcp_port_zero_takes_a_free_port_that_the_address_names(stack: AsyncExitStack) -> None:
    listener = await listen(stack, "tcp:127.0.0.1:0")
    assert not listener.address.endswith(":0")
    channel = await connect(listener.address, wire=api_wire())
    assert await channel.call("one", timeout_seconds=10) == 1
    await channel.close()


async def test_unix_socket_is_private_and_removed_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "s"
    async with AsyncExitStack() as stack:
        await listen(stack, f"unix:{path}")
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert not os.path.exists(path)  # noqa: ASYNC240


async def test_right_secret_is_let_in_and_wrong_ones_are_not(stack: AsyncExitStack) -> None:
    listener = await listen(stack, "tcp:127.0.0.1:0", secret=b"right")
    for wrong in (b"wrong", b""):
        with pytest.raises(ChannelClosed, match="it disconnected during the handshake"):
            await connect(listener.address, wire=api_wire(), peer="the driver", secret=wrong)
    assert listener.channels == set()
    channel = await connect(listener.address, wire=api_wire(), secret=b"right")
    assert await channel.call("one", timeout_seconds=10) == 1
    await channel.close()


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
    listener = await listen(stack, "tcp:127.0.0.1:0", handshake_seconds=0.05)
    reader, writer = await asyncio.open_connection("127.0.0.1", int(listener.address.rsplit(":", 1)[1]))
    assert len(await asyncio.wait_for(reader.read(), 10)) == 32  # the nonce, then the end
    writer.close()


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
