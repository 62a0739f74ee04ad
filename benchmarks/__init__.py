"""Every speed claim as a ratio against a named peer. Settles how torch's threads wait, before torch loads."""

from areal.utils.threads import settle_waiting

settle_waiting()
