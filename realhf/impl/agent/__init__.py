"""The agents that come with this interface. Importing one registers it, so a new one is imported here."""

import realhf.impl.agent.math_multi_turn_agent  # noqa: F401
