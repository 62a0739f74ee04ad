"""Agents on Pydantic AI. Each is an example to copy: nothing in it knows that it is being trained."""
