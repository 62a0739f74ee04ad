"""Agents on LangGraph. Each is an example to copy: nothing in it knows that it is being trained."""
