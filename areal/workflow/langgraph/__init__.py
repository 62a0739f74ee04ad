"""Agents on LangGraph. Each is an example to copy: nothing in them knows that it is being trained."""
