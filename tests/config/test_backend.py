import pytest

from areal.config.backend import Backend
from areal.config.errors import ConfigError
from areal.config.rollout import RolloutConfig
from areal.config.training import ActorConfig


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
    with pytest.raises(ConfigError, match="must be unix:PATH, tcp:HOST:PORT or, of vLLM or SGLang, http://HOST:PORT"):
        RolloutConfig(addresses=["10.0.0.1:7000"])
    with pytest.raises(ConfigError, match="leave one of them out"):
        RolloutConfig(addresses=["unix:/run/engine"], backend="vllm:d2")


def test_addresses_of_vllm_and_sglang_go_with_their_backend() -> None:
    urls = ["http://10.0.0.1:8000", "https://10.0.0.2"]
    assert RolloutConfig(backend="vllm", addresses=urls).server_urls == urls
    for backend in ("embedded", "vllm:d2"):
        with pytest.raises(ConfigError, match=f"need backend=vllm or backend=sglang, .* got {backend}"):
            RolloutConfig(backend=backend, addresses=urls)
    with pytest.raises(ConfigError, match=r"got both: http://10\.0\.0\.1:8000, tcp:10\.0\.0\.1:7000"):
        RolloutConfig(backend="vllm", addresses=[urls[0], "tcp:10.0.0.1:7000"])


def test_flash_attention_is_for_ranks_in_half_precision() -> None:
    assert ActorConfig(attention="varlen", backend="fsdp:d2", dtype="bfloat16").attention == "varlen"
    for settings in ({"dtype": "bfloat16"}, {"backend": "fsdp:d2"}):
        with pytest.raises(ConfigError, match=r"attention varlen is for ranks in bfloat16, .* or leave attention out"):
            ActorConfig(attention="varlen", **settings)
