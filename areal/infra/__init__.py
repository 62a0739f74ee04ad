"""Where code runs: episode context, HTTP clients, worker processes, schedulers."""

from areal.infra import workflow_context

__all__ = ["workflow_context"]
