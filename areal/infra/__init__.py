"""What all processes of a run build on: calls between them, schedulers, the episode context, HTTP clients, stalls."""

from areal.infra import workflow_context

__all__ = ["workflow_context"]
