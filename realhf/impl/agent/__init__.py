"""Agents that ship with the façade; importing one registers it, so a new one is added here."""

import realhf.impl.agent.math_multi_turn_agent  # noqa: F401
