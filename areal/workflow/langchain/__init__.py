"""Agents on LangChain. Each is an example to copy: nothing in them knows that it is being trained."""
