"""Run and train the model, and make the built-in one. Settles how torch's threads wait, before torch loads."""

from areal.utils.threads import quiet_threads

quiet_threads()
