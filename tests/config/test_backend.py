import pytest

from areal.config.backend import Backend
from areal.config.errors import ConfigError
from areal.config.rollout import RolloutConfig


@pytest.mark.parametrize(
    ("text", "backend"),
    [
        ("embedded", Backend("embedded", 1, 1)),
        ("embedded:d2", Backend("embedded", 2, 1)),
        ("vllm", Backend("vllm", 1, 1)),
        ("vllm:d2t4", Backend("vllm", 2, 4)),
        ("vllm:t4", Backend("vllm", 1, 4)),
        ("sglang:d4", Backend("sglang", 4, 1)),
    ],
)
def test_backend_is_a_kind_servers_and_gpus(text: str, backend: Backend) -> None:
    assert Backend.parse(text) == backend


@pytest.mark.parametrize("text", ["", "tgi", "vllm:", "vllm:2", "vllm:t4d2", "vllm:d2x", "VLLM", "vllm:d-1", "vllm d2"])
def test_other_spellings_are_refused_with_the_choices(text: str) -> None:
    with pytest.raises(ConfigError, match=r"backend must be one of embedded, vllm, sglang, .* e\.g\. embedded"):
        RolloutConfig(backend=text)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("vllm:d0", "d >= 1 servers"),
        ("vllm:d1t0", "t >= 1 GPUs"),
        ("embedded:d2t2", "computes on one device"),
    ],
)
def test_impossible_numbers_are_refused(text: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        RolloutConfig(backend=text)


def test_addresses_replace_what_a_backend_would_start() -> None:
    assert RolloutConfig(addresses=["unix:/run/engine", "tcp:10.0.0.1:7000"]).addresses
    with pytest.raises(ConfigError, match="unix:PATH or tcp:HOST:PORT"):
        RolloutConfig(addresses=["http://10.0.0.1"])
    with pytest.raises(ConfigError, match="leave one of them out"):
        RolloutConfig(addresses=["unix:/run/engine"], backend="vllm:d2")
