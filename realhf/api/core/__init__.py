"""One file per noun; `agent_api` (or `agent`) has them all. Loads no torch."""
