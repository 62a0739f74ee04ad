import pytest

from areal.utils.net import bypass_proxies


@pytest.mark.parametrize(
    ("environ", "hosts"),
    [
        ({}, "127.0.0.1,localhost,::1"),
        ({"NO_PROXY": "a, localhost"}, "a,localhost,127.0.0.1,::1"),
        ({"NO_PROXY": "a", "no_proxy": "b"}, "b,127.0.0.1,localhost,::1"),
        ({"no_proxy": "*"}, "*"),
    ],
)
def test_loopback_is_added_to_what_bypasses_proxies(environ: dict[str, str], hosts: str) -> None:
    assert bypass_proxies(environ) == {"NO_PROXY": hosts, "no_proxy": hosts}
