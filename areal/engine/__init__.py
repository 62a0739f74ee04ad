"""Run and train models, and make the built-in ones. Sets how torch's idle threads wait, before torch loads."""

from areal.utils.threads import settle_waiting

settle_waiting()
