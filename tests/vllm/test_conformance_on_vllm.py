"""The tests that every engine passes, on a real vLLM server behind its engine process."""

import pytest
import test_conformance
import test_streaming
from test_conformance import *  # noqa: F403
from test_streaming import *  # noqa: F403

pytestmark = pytest.mark.asyncio(loop_scope="session")

test_conformance.LONG = test_streaming.LONG = 1000
"""vLLM tells of an answer's first token after more of them than the embedded engine does."""
