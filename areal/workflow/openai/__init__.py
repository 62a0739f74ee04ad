"""Agents that speak OpenAI's wire. Each is an example to copy: nothing in them knows that it is being trained."""
