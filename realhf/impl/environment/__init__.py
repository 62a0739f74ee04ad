"""Environments that ship with the façade; importing one registers it, so a new one is added here."""

import realhf.impl.environment.math_code_single_step_env  # noqa: F401
