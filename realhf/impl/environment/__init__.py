"""The environments that come with this interface. Importing one registers it, so a new one is imported here."""

import realhf.impl.environment.math_code_single_step_env  # noqa: F401
