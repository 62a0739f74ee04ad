"""The tests that every engine passes, on a real vLLM server behind its engine process."""

import pytest
from test_conformance import *  # noqa: F403
from test_streaming import *  # noqa: F403

pytestmark = pytest.mark.asyncio(loop_scope="session")
