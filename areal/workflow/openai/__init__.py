"""Agents on OpenAI's SDKs. Each is an example to copy: nothing in it knows that it is being trained."""
