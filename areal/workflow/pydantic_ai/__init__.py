"""Agents on Pydantic AI. Each is an example to copy: nothing in them knows that it is being trained."""
