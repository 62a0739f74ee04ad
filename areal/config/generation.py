"""How completions are sampled."""

from dataclasses import dataclass, field, replace
from typing import Any

from areal.config.errors import require


@dataclass
class GenerationHyperparameters:
    n_samples: int = 1
    """Episodes per task; together they form the group that advantages are computed in."""
    max_new_tokens: int = 512
    """Tokens a completion may have at most, the end token included."""
    min_new_tokens: int = 0
    """Stop tokens are not sampled before this many tokens."""
    greedy: bool = False
    """Take the likeliest token; the same as temperature 0."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """Sample among this many likeliest tokens; 0 = all."""
    stop_token_ids: list[int] = field(default_factory=list)
    stop: list[str] = field(default_factory=list)
    """Texts that end a completion; the token that completes one is kept."""
    seed: int | None = None
    """Makes one request reproducible; None = a fresh seed for each."""

    def __post_init__(self) -> None:
        require(self.n_samples >= 1, f"n_samples must be >= 1, got {self.n_samples}")
        require(self.max_new_tokens >= 1, f"max_new_tokens must be >= 1, got {self.max_new_tokens}")
        require(
            0 <= self.min_new_tokens <= self.max_new_tokens,
            f"min_new_tokens must lie in [0, max_new_tokens={self.max_new_tokens}], got {self.min_new_tokens}",
        )
        require(self.temperature >= 0, f"temperature must be >= 0, got {self.temperature}; use 0 for greedy")
        require(0 < self.top_p <= 1, f"top_p must lie in (0, 1], got {self.top_p}; use 1 for no limit")
        require(self.top_k >= 0, f"top_k must be >= 0, got {self.top_k}; use 0 for no limit")

    def new(self, **overrides: Any) -> "GenerationHyperparameters":
        """A copy with some fields changed."""
        return replace(self, **overrides)

    def new_with_stop_and_pad_token_ids(self, tokenizer: Any) -> "GenerationHyperparameters":
        """A copy that also stops at the tokenizer's end and padding tokens."""
        ids = list(self.stop_token_ids)
        for token_id in (tokenizer.eos_token_id, tokenizer.pad_token_id):
            if token_id is not None and token_id not in ids:
                ids.append(token_id)
        return self.new(stop_token_ids=ids)
