"""Agents on Anthropic's SDK. Each is an example to copy: nothing in it knows that it is being trained."""
