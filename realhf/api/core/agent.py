"""The same names as `realhf.api.core.agent_api`."""

from realhf.api.core.agent_api import *  # noqa: F403
from realhf.api.core.agent_api import __all__ as __all__
