"""How rollout works: how completions are sampled, how episodes are run, and what the proxy allows its clients.

`gconfig` is a GenerationHyperparameters, `rollout` a RolloutConfig with its AgentConfig, `proxy` a ProxyConfig with its
ProxyLimits.
"""

from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from areal.config.errors import require
from areal.utils.net import is_loopback


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

    @property
    def sampling_temperature(self) -> float:
        """What logits are divided by: a greedy choice is made on undivided ones."""
        return 1.0 if self.greedy else self.temperature or 1.0

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


@dataclass
class ProxyLimits:
    max_sessions: int = 10_000
    """Sessions open at once."""
    max_calls_per_session: int = 64
    """Calls of one session running at once; one more is answered 429."""
    max_tokens_per_session: int | None = None
    """Tokens that the calls of one session may take, prompts and answers counted; a call that might take more is
    answered 429. None = no limit."""
    max_body_bytes: int = 16 * 2**20
    """Size of a request's body; a bigger one is answered 413."""
    max_choices: int = 128
    """Largest `n` of one request."""
    body_timeout_seconds: float = 30.0
    """Time a client may take to send the head of a request, and then its body."""
    call_timeout_seconds: float = 3600.0
    """Time the engine may take for one call; longer is answered 503."""
    session_timeout_seconds: float = 3600.0
    """Time that a session opened over HTTP may stay open before it is ended for its agent."""
    reward_timeout_seconds: float = 600.0
    """Time after such a session ends in which its reward may still come."""
    remembered_answers: int = 64
    """Answers of a session that a retry is given again; one of an older call is a new sample."""
    remembered_ended_sessions: int = 10_000
    """Ended sessions whose keys answer 410; older ones answer 401 like keys that never were."""

    def __post_init__(self) -> None:
        for limit in fields(self):
            value = getattr(self, limit.name)
            if value is None:
                continue
            least = 0 if limit.name == "remembered_ended_sessions" else 1
            timed = limit.name.endswith("_seconds")
            require(
                value > 0 if timed else value >= least,
                f"{limit.name} must be {'> 0 seconds' if timed else f'>= {least}'}, got {value}",
            )


@dataclass
class ProxyConfig:
    host: str = "127.0.0.1"
    """Address that the proxy of a rollout worker listens on; beyond loopback it needs an admin_key."""
    port: int = 0
    """0 = a free one for each worker."""
    admin_key: str = ""
    """Manages sessions over HTTP and calls no model; empty = one is made for the run."""
    drop_params: bool = False
    """Go on without request parameters that cannot be honoured, with a line in the log, instead of answering 400."""
    tool_parser: str | None = None
    """How the model writes tool calls: hermes, qwen3_coder, llama3, mistral, …; None = as its chat template does."""
    reasoning_parser: str | None = None
    """How it marks thinking: think, mistral, or none = thinking is text; None = as its chat template does."""
    limits: ProxyLimits = field(default_factory=ProxyLimits)

    def __post_init__(self) -> None:
        require(0 <= self.port < 65536, f"port must lie in [0, 65535], got {self.port}; use 0 for a free one")
        require(
            is_loopback(self.host) or self.admin_key != "",
            f"host={self.host} lets other machines in and needs an explicit admin_key; set one, or use 127.0.0.1",
        )


@dataclass
class AgentConfig:
    mode: Literal["inline", "subproc", "online"] = "inline"
    """Where an agent runs: inline = in the rollout worker's event loop; subproc = in processes that may be killed;
    online = outside this system, from where it asks for sessions over HTTP."""
    self_reward: bool = False
    """Mode online: let a session's own key reward and end its session; else only the admin key can."""
    subproc_max_workers: int = 4
    """Processes of each rollout worker in mode subproc, each with one episode at a time."""
    timeout_seconds: float = 600.0
    """An episode that takes longer is cancelled and rejected as `timeout`."""
    turn_discount: float = 1.0
    """What a later turn's return is worth to the turn before it."""
    export_style: Literal["individual", "concat"] = "individual"
    """individual = a row per completion; concat = a row per conversation leaf."""

    def __post_init__(self) -> None:
        require(self.subproc_max_workers >= 1, f"subproc_max_workers must be >= 1, got {self.subproc_max_workers}")
        require(self.timeout_seconds > 0, f"timeout_seconds must be > 0 seconds, got {self.timeout_seconds}")
        require(0 <= self.turn_discount <= 1, f"turn_discount must lie in [0, 1], got {self.turn_discount}")


@dataclass
class RolloutConfig:
    max_head_offpolicyness: int = 2
    """How many versions a trained sample may lag behind the policy; 0 = synchronous."""
    max_concurrent_rollouts: int = 256
    """Episodes running at once."""
    max_idle_rejections: int = 512
    """Rejected episodes in a row, with none accepted, before the run stops with the cause."""
    num_workers: int = 1
    """Processes that run episodes."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """What the embedded engine computes in. Its log-probs are the trainer's in float32 only; with bfloat16 the trainer
    recomputes them (actor.recompute_logprob)."""
    in_process: bool = False
    """Run the episodes inside the driver, for breakpoints and tests."""
    stall_seconds: float | None = 0.5
    """Code that holds a worker's event loop for longer is reported with its line; None = nobody watches."""
    agent: AgentConfig = field(default_factory=AgentConfig)

    @property
    def turns(self) -> int:
        """Episodes that one may have to wait for in its worker, itself counted: processes take one at a time."""
        if self.agent.mode != "subproc":
            return 1
        return -(-self.max_concurrent_rollouts // self.agent.subproc_max_workers)

    def __post_init__(self) -> None:
        require(
            self.max_head_offpolicyness >= 0,
            f"max_head_offpolicyness must be >= 0, got {self.max_head_offpolicyness}; use 0 for synchronous training",
        )
        for name in ("max_concurrent_rollouts", "max_idle_rejections", "num_workers"):
            value = getattr(self, name)
            require(value >= 1, f"{name} must be >= 1, got {value}")
        require(
            self.stall_seconds is None or self.stall_seconds >= 0.05,
            f"stall_seconds must be >= 0.05 s, got {self.stall_seconds}; use null to watch nothing",
        )
        require(
            self.agent.mode != "online" or self.num_workers == 1,
            f"agent.mode=online has one address for all agents, got num_workers={self.num_workers}; set it to 1",
        )
        require(
            not self.in_process or self.num_workers == 1,
            f"in_process runs one worker inside the driver, got num_workers={self.num_workers}; set it to 1",
        )
