"""`agent_api` (or `agent`) has every name. Loads no torch."""
