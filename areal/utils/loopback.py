"""Calls to this very machine never go through a proxy."""

from collections.abc import Mapping

LOOPBACK_HOSTS = ("127.0.0.1", "localhost", "::1")


def bypass_proxies(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables to set so that clients which read `environ` reach loopback addresses directly."""
    listed = environ.get("no_proxy") or environ.get("NO_PROXY") or ""
    hosts = [host.strip() for host in listed.split(",") if host.strip()]
    if "*" not in hosts:
        hosts += [host for host in LOOPBACK_HOSTS if host not in hosts]
    value = ",".join(hosts)
    return {"NO_PROXY": value, "no_proxy": value}
