"""Agents on Anthropic's SDK. Each is an example to copy: nothing in them knows that it is being trained."""
