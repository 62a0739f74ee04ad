"""Keys come from a setting, a file or the environment, and the settings that are written down never show them."""

from dataclasses import asdict
from pathlib import Path

import pytest

from areal.config.errors import ConfigError
from areal.config.keys import ADMIN_KEY_VARIABLE, API_KEY_VARIABLE, find_key
from areal.config.rollout import ProxyConfig


@pytest.fixture(autouse=True)
def no_keys_around(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (ADMIN_KEY_VARIABLE, API_KEY_VARIABLE):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def key_file(tmp_path: Path) -> str:
    path = tmp_path / "key"
    path.write_text("from-a-file\n")
    return str(path)


def test_admin_key_is_given_or_in_a_file_or_in_the_environment(key_file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ProxyConfig().with_key().admin_key == ""
    monkeypatch.setenv(ADMIN_KEY_VARIABLE, "from-the-environment")
    assert ProxyConfig().with_key().admin_key == "from-the-environment"
    assert ProxyConfig(admin_key_file=key_file).with_key().admin_key == "from-a-file"
    assert ProxyConfig(admin_key="given").with_key().admin_key == "given"


def test_key_is_not_in_the_settings_until_it_is_asked_for(key_file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ADMIN_KEY_VARIABLE, "from-the-environment")
    assert asdict(ProxyConfig())["admin_key"] == asdict(ProxyConfig(admin_key_file=key_file))["admin_key"] == ""


def test_any_of_them_lets_the_proxy_listen_beyond_this_machine(key_file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"needs an admin_key, an admin_key_file or AREAL_ADMIN_KEY"):
        ProxyConfig(host="0.0.0.0")
    ProxyConfig(host="0.0.0.0", admin_key_file=key_file)
    monkeypatch.setenv(ADMIN_KEY_VARIABLE, "chosen")
    ProxyConfig(host="0.0.0.0")


def test_two_admin_keys_are_refused(key_file: str) -> None:
    with pytest.raises(ConfigError, match="got both"):
        ProxyConfig(admin_key="given", admin_key_file=key_file)


@pytest.mark.parametrize("written", [b"", b"\n", b"two words", "schlüssel".encode(), b"\xff\xfe"])
def test_key_that_fits_no_header_is_refused_without_showing_it(tmp_path: Path, written: bytes) -> None:
    (tmp_path / "key").write_bytes(written)
    with pytest.raises(ConfigError, match=r"proxy.admin_key .*key") as refused:
        ProxyConfig(admin_key_file=str(tmp_path / "key")).with_key()
    assert "schl" not in str(refused.value)


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--api-key must be in a file that can be read, got .*nowhere"):
        find_key(None, str(tmp_path / "nowhere"), API_KEY_VARIABLE, "--api-key")


@pytest.mark.parametrize("url", ["agents.example", "ftp://agents.example", "//x"])
def test_public_url_must_be_one(url: str) -> None:
    with pytest.raises(ConfigError, match="public_url must be http"):
        ProxyConfig(public_url=url)
