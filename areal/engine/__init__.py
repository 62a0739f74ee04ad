"""Run and train the model, and make the built-in one. Settles how torch's threads wait, before torch loads."""

from areal.utils.threads import settle_waiting

settle_waiting()
