"""Files that a process on another host fetches from the driver."""

from pathlib import Path

import pytest
import torch

from areal.api.errors import ModelError, WeightMismatch
from areal.engine.model.published import WeightWriter
from areal.infra.rpc.channel import Channel
from areal.infra.rpc.connect import Listener, connect, serve
from areal.infra.rpc.shipping import SCRATCH_VARIABLE, Shipper, local_model
from areal.infra.rpc.wire import api_wire


class Driver:
    """Serves what a run ships; a channel of its own stands for another host's."""

    def __init__(self, directory: Path) -> None:
        self.shipper = Shipper([directory])
        self._address = f"unix:{directory.parent}/socket"
        self._listener: Listener | None = None

    async def channel(self) -> Channel:
        def add(channel: Channel) -> None:
            channel.handlers.update(self.shipper.handlers)

        self._listener = await serve(self._address, add, wire=api_wire(), secret=b"secret")
        return await connect(self._address, wire=api_wire(), secret=b"secret")

    async def close(self) -> None:
        if self._listener is not None:
            await self._listener.close()


@pytest.fixture
async def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> object:
    (tmp_path / "model").mkdir()
    (tmp_path / "scratch").mkdir()
    monkeypatch.setenv(SCRATCH_VARIABLE, str(tmp_path / "scratch"))
    driver = Driver(tmp_path / "model")
    yield driver
    await driver.close()


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if this process were on a host that has none of the driver's paths."""
    monkeypatch.setattr("areal.infra.rpc.shipping.is_here", lambda directory: False)


async def test_a_model_that_is_here_does_not_travel(driver: Driver, tmp_path: Path) -> None:
    assert await local_model(await driver.channel(), tmp_path / "model") == tmp_path / "model"


async def test_a_model_travels_without_its_weights(
    driver: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model/config.json").write_text("{}")
    (tmp_path / "model/model.safetensors").write_bytes(b"weights")
    channel = await driver.channel()
    here = iter([False, True])  # not at the process, but at the driver
    monkeypatch.setattr("areal.infra.rpc.shipping.is_here", lambda directory: next(here))
    copy = await local_model(channel, tmp_path / "model")
    assert copy == tmp_path / "scratch/model"
    assert {path.name: path.read_text() for path in copy.iterdir()} == {"config.json": "{}"}


async def test_only_the_directories_of_the_run_are_given_away(driver: Driver, tmp_path: Path, elsewhere: None) -> None:
    with pytest.raises(ModelError, match="is no directory of this run"):
        await local_model(await driver.channel(), tmp_path)


async def test_no_other_file_can_be_read_as_weights(driver: Driver, tmp_path: Path) -> None:
    (tmp_path / "published").mkdir()
    driver.shipper.published = WeightWriter(tmp_path / "published", [("w", torch.ones(3))]).write(0)
    channel = await driver.channel()
    with pytest.raises(WeightMismatch, match="cannot be fetched"):
        await channel.call("read_weights", 0, "../../secret", 0, "", timeout_seconds=10)
