"""How episodes are run: how many, how stale, and how an agent reaches the policy."""

from dataclasses import dataclass, field
from typing import Literal

from areal.config.errors import require


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
