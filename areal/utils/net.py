"""Loopback addresses, and how HTTP clients are kept from reaching them through a proxy."""

import ipaddress
from collections.abc import Mapping
from functools import lru_cache

LOOPBACK_HOSTS = ("127.0.0.1", "localhost", "::1")


def bypass_proxies(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables to set so that clients which read `environ` reach loopback addresses directly."""
    listed = environ.get("no_proxy") or environ.get("NO_PROXY") or ""
    hosts = [host.strip() for host in listed.split(",") if host.strip()]
    if "*" not in hosts:
        hosts += [host for host in LOOPBACK_HOSTS if host not in hosts]
    value = ",".join(hosts)
    return {"NO_PROXY": value, "no_proxy": value}


@lru_cache(64)
def is_loopback(host: str) -> bool:
    """Whether only this machine can reach what listens there."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
