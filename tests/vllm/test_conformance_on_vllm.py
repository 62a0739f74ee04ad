"""The tests that every engine passes, on a real vLLM server."""

import pytest
import test_conformance
import test_streaming
from test_conformance import *  # noqa: F403
from test_streaming import *  # noqa: F403

pytestmark = pytest.mark.asyncio(loop_scope="session")

test_conformance.LONG = test_streaming.LONG = 150
"""vLLM takes about as long for these as the embedded engine takes for more."""
