"""The model that is trained and how it is optimised, and what happens around the steps.

Around them are evaluation, checkpoints, recovery and placement.
"""

import math
from dataclasses import dataclass, field
from typing import Literal

from areal.config.device import require_device_among, require_device_name
from areal.config.errors import require
from areal.config.parallel import Ranks
from areal.config.resources import Resources


@dataclass
class OptimizerConfig:
    """AdamW and its learning rate."""

    lr: float = 2e-4
    """Learning rate after the warm-up."""
    beta1: float = 0.9
    """Decay of the running mean of the gradient, per step."""
    beta2: float = 0.99
    """Decay of the running mean of its square, per step."""
    eps: float = 1e-8
    """Added to the denominator of a step."""
    weight_decay: float = 0.0
    """AdamW's, of matrices only: at each step a weight shrinks by this share times the learning rate."""
    warmup_steps: int = 10
    """Steps over which the learning rate rises linearly from near 0."""
    lr_scheduler: Literal["constant", "cosine"] = "constant"
    """constant after the warm-up; cosine = falls to a tenth by the end of the run."""
    gradient_clipping: float = 1.0
    """Largest gradient norm; 0 = no clipping."""

    def __post_init__(self) -> None:
        require(self.lr > 0, f"lr must be > 0, got {self.lr}")
        require(self.lr < math.inf, f"lr must be finite, got {self.lr}")
        for name in ("beta1", "beta2"):
            require(0 <= getattr(self, name) < 1, f"{name} must lie in [0, 1), got {getattr(self, name)}")
        require(self.eps > 0, f"eps must be > 0, got {self.eps}; a weight without a gradient is divided by it")
        require(0 <= self.weight_decay < math.inf, f"weight_decay must be >= 0, got {self.weight_decay}")
        require(self.gradient_clipping >= 0, f"gradient_clipping must be >= 0, got {self.gradient_clipping}")
        require(self.warmup_steps >= 0, f"warmup_steps must be >= 0, got {self.warmup_steps}")


@dataclass
class ActorConfig(Resources):
    """The model that is trained, its loss, and what the trainer needs of its machine."""

    path: str = "builtin:tiny-math"
    """A Hugging Face directory or id, or `builtin:NAME` for a model this package makes itself."""
    device: str = "auto"
    """Where the model and the reference are computed: cpu, cuda, cuda:N or mps; auto = cuda if there is one, else mps,
    else cpu."""
    backend: str = ""
    """Empty = the model is trained in the driver itself; fsdp:dN or fsdp:dNtM = on N times M ranks, processes of their
    own with `gpus`, `cpus` and `memory_gib` each: parameters, gradients and optimizer are sharded over N, and each
    matrix product is computed by M."""
    offload: bool = False
    """fsdp: parameters and optimizer rest in host memory and come to the device a layer at a time."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """What matrix products and attention are computed in. Weights, gradients and the optimizer are float32 either way;
    with bfloat16 log-probs differ from the sampler's and are recomputed (recompute_logprob)."""
    attention: Literal["auto", "mask", "varlen"] = "auto"
    """fsdp: what keeps packed sequences apart: masks, or torch's flash attention for sequences of various lengths. That
    needs a GPU and bfloat16, and knows no capped scores; auto = varlen where it can be used, else mask."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """How gradients become steps."""
    max_tokens_per_mb: int = 16384
    """Tokens in one forward and backward pass; bounds the memory and does not change the result."""
    gradient_checkpointing: bool = False
    """Recompute each layer in the backward pass instead of keeping its activations: less memory, more time."""
    ppo_n_minibatches: int = 1
    """Optimizer steps per batch."""
    eps_clip: float = 0.2
    """The policy ratio is clipped below 1 - eps_clip."""
    eps_clip_higher: float | None = None
    """The policy ratio is clipped above 1 + this; None = eps_clip."""
    dual_clip: float | None = 3.0
    """The loss of a token with a negative advantage A is at most this times |A|, however much likelier the token has
    become; None = not bounded."""
    kl_ctl: float = 0.0
    """Weight of the KL penalty against the reference model `ref.path`."""
    adv_norm: Literal["none", "group", "batch"] = "none"
    """What the advantage is divided by: nothing, or its group's or the batch's standard deviation over completions
    (unbiased: n - 1), plus 1e-6. Where the deviation is 0, so is the advantage."""
    group_baseline: Literal["mean", "none"] = "mean"
    """What a return is compared with: the mean over the completions of its group, or nothing."""
    gae_lambda: float = 1.0
    """With a critic: how much of what it failed to predict counts for the tokens before; 1 = the advantage is the
    return minus the value, 0 = the next value minus this one."""
    discount: float = 1.0
    """With a critic: what the return counts less for each token that was still to come. Turns have one of their own
    (rollout.agent.turn_discount)."""
    loss_norm: Literal["token", "completion"] = "token"
    """The loss is a mean over tokens, or over completions, each with the mean of its tokens."""
    use_decoupled_loss: bool = False
    """Clip around recomputed log-probs of the policy before the update, and weight by their ratio to the sampler's."""
    behave_imp_weight_cap: float | None = 5.0
    """Decoupled loss: tokens whose weight exceeds this are left out; None = none are."""
    recompute_logprob: Literal[True, False, "auto"] = "auto"
    """Clip around the trainer's log-probs in place of the sampler's; auto = once they have been seen to differ. With
    rollout.max_head_offpolicyness > 0 this implies the decoupled loss, which keeps the weight of the sampler's."""
    mask_truncated: bool = False
    """Do not train tokens of completions that ended for length. Their rewards still count for their group's mean."""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """An update whose loss or gradient is not a finite number ends the run, with its batch and a checkpoint saved
    (stop), or is left out and counted as skipped_updates (skip). Either way it changes no weight."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.path != "", "path must name a model; use builtin:tiny-math for the one that needs no download")
        require_device_name("device", self.device)
        require_device_among(self.gpus, self.device)
        if self.backend:
            Ranks.parse(self.backend)
        require(
            not self.offload or self.backend != "",
            "offload is for a model on ranks; set backend to fsdp:d1 or more, or leave offload out",
        )
        require(
            self.attention != "varlen" or (self.backend != "" and self.dtype == "bfloat16"),
            f"attention varlen is for ranks in bfloat16, got backend {self.backend!r} and dtype {self.dtype}; set them "
            "to fsdp:d1 or more and bfloat16, or leave attention out",
        )
        require(0 < self.eps_clip < 1, f"eps_clip must lie in (0, 1), got {self.eps_clip}")
        require(
            self.eps_clip_higher is None or self.eps_clip_higher > 0,
            f"eps_clip_higher must be > 0, got {self.eps_clip_higher}; leave it out to use eps_clip",
        )
        require(
            self.dual_clip is None or self.dual_clip > 1,
            f"dual_clip must be > 1, got {self.dual_clip}; use null for no bound",
        )
        require(
            self.behave_imp_weight_cap is None or self.behave_imp_weight_cap > 0,
            f"behave_imp_weight_cap must be > 0, got {self.behave_imp_weight_cap}; use null for no cap",
        )
        for name in ("gae_lambda", "discount"):
            require(0 <= getattr(self, name) <= 1, f"{name} must lie in [0, 1], got {getattr(self, name)}")
        require(self.kl_ctl >= 0, f"kl_ctl must be >= 0, got {self.kl_ctl}")
        require(self.kl_ctl < math.inf, f"kl_ctl must be finite, got {self.kl_ctl}")
        require(self.max_tokens_per_mb >= 1, f"max_tokens_per_mb must be >= 1, got {self.max_tokens_per_mb}")
        require(self.ppo_n_minibatches >= 1, f"ppo_n_minibatches must be >= 1, got {self.ppo_n_minibatches}")


@dataclass
class ReferenceConfig:
    """The reference model of the KL penalty."""

    path: str = ""
    """The frozen model that the KL penalty compares with, usually the same as actor.path; empty = none."""


@dataclass
class CriticConfig:
    """The value model that advantages are taken against, in place of the mean of a group."""

    path: str = ""
    """The model that it starts from, usually the same as actor.path; empty = no critic. It is computed where the actor
    is, with its dtype, max_tokens_per_mb, gradient_checkpointing and offload."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """How its gradients become steps, one for each of the actor's."""
    eps_clip: float | None = None
    """A value that has moved by more than this since the batch came gets no credit for what it moved beyond; None = it
    may move freely."""
    warmup_steps: int = 0
    """During so many steps at the start of a run only the critic learns."""

    def __post_init__(self) -> None:
        require(
            self.eps_clip is None or self.eps_clip > 0,
            f"eps_clip must be > 0, got {self.eps_clip}; use null for no clip",
        )
        require(self.warmup_steps >= 0, f"warmup_steps must be >= 0, got {self.warmup_steps}")


@dataclass
class EvaluatorConfig:
    """When the policy is evaluated."""

    freq_steps: int | None = None
    """Evaluate on valid_dataset every this many steps, before the first and after the last; None = only those two."""
    greedy: bool = True
    """Also evaluate with greedy decoding, before the first and after the last step."""
    n_samples: int = 1
    """Sampled episodes per held-out task: the rate is their mean (avg@n); with more than one, pass@k is given too."""

    def __post_init__(self) -> None:
        require(self.n_samples >= 1, f"n_samples must be >= 1, got {self.n_samples}")
        require(self.freq_steps is None or self.freq_steps >= 1, f"freq_steps must be >= 1, got {self.freq_steps}")


@dataclass
class SaverConfig:
    """When checkpoints are written, and how many are kept."""

    freq_steps: int | None = 50
    """Write a checkpoint every this many steps, after the last and on Ctrl-C; None = only those two."""
    keep: int = 2
    """Checkpoints kept; older ones are removed after a newer one is complete."""

    def __post_init__(self) -> None:
        require(self.freq_steps is None or self.freq_steps >= 1, f"freq_steps must be >= 1, got {self.freq_steps}")
        require(self.keep >= 1, f"keep must be >= 1, got {self.keep}")


@dataclass
class StoreConfig:
    """The run store, RUN/run.db: everything that was sampled, trained and rejected."""

    full_disk_seconds: float = 600.0
    """How long the run waits for room on a full disk. Then it ends, with what was committed; 0 = at once."""

    keep_tokens: Literal["all", "none"] | int = "all"
    """Whose tokens and log-probs are kept: of all steps, of none, or of this many of the newest. Conversations and
    figures stay, and always the tokens that a resumed run may need: those since the oldest checkpoint that is kept, and
    those that are not trained yet."""

    def __post_init__(self) -> None:
        require(self.full_disk_seconds >= 0, f"full_disk_seconds must be >= 0, got {self.full_disk_seconds}")
        require(
            not isinstance(self.keep_tokens, int) or self.keep_tokens >= 1,
            f"keep_tokens must be all, none or a number of steps >= 1, got {self.keep_tokens}",
        )

    @property
    def steps_with_tokens(self) -> int | None:
        """None = all."""
        return {"all": None, "none": 0}[self.keep_tokens] if isinstance(self.keep_tokens, str) else self.keep_tokens


@dataclass
class MetricsConfig:
    """What the driver shows to Prometheus while it runs: docs/deployment.md."""

    port: int | None = None
    """GET /metrics is answered there; 0 = a free port, which is printed; None = nothing listens."""
    host: str = "127.0.0.1"
    """Address that it listens on; 0.0.0.0 = every one of the driver's machine. Beyond loopback everybody who reaches it
    can read it, the names of the run and of the model included."""

    def __post_init__(self) -> None:
        require(
            self.port is None or 0 <= self.port < 65536,
            f"port must lie in [0, 65535], got {self.port}; use 0 for a free one, or null for none",
        )
        require(self.host != "", "host must be an address, got none; use 127.0.0.1 for this machine alone")


@dataclass
class ViewerConfig:
    """Whether the run is shown in a browser while it trains: docs/viewer.md. `areal view` shows it at any time."""

    port: int | None = None
    """Pages are served there; 0 = a free port, which is printed; None = nothing listens."""
    host: str = "127.0.0.1"
    """Address that it listens on. Beyond loopback, the printed address has a token that whoever looks must know."""

    def __post_init__(self) -> None:
        require(
            self.port is None or 0 <= self.port < 65536,
            f"port must lie in [0, 65535], got {self.port}; use 0 for a free one, or null for none",
        )
        require(self.host != "", "host must be an address, got none; use 127.0.0.1 for this machine alone")


@dataclass
class RecoverConfig:
    """What happens to a run that exists."""

    mode: Literal["auto", "off", "force"] = "auto"
    """An unfinished run of the same name is resumed (auto) or refused (off). A finished one is always refused. auto
    also refuses one whose seed, tasks, shuffle, batch_size or n_samples have changed, since its tasks would come in
    another order; force resumes it with the new ones."""


@dataclass
class SchedulerConfig:
    """Where the processes of a run are placed, and with how many threads."""

    type: Literal["local", "slurm", "ray"] = "local"
    """local = processes on this machine; slurm = steps of the Slurm allocation that the driver runs in, or of one that
    is made for the run; ray = on the nodes of a Ray cluster."""
    nodes: int = 1
    """slurm: on how many nodes of a cluster an allocation is made."""
    slurm_arguments: list[str] = field(default_factory=list)
    """slurm: further arguments of salloc or sbatch, e.g. [--partition=gpu, --time=12:00:00]."""
    ray_address: str | None = None
    """ray: the cluster, as ray.init takes it; None = RAY_ADDRESS, else one of this machine, else a new one."""
    address: str | None = None
    """The driver's own address, at which processes on other hosts reach it; None = that of the interface through which
    the driver reaches them (local: 127.0.0.1). It listens there and nowhere else."""
    place_seconds: float = 300.0
    """How long the run waits for the places of all its processes; then it ends, and says what is free."""
    threads: int | None = None
    """Threads that the engine and the trainer each compute with; None = the machine's cores are shared out."""
    heartbeat_seconds: float | None = 10.0
    """An engine or a rollout worker that sends no heartbeat for this many seconds, and does not compute, is frozen: it
    is killed and treated as dead. Code that blocks a worker's event loop does not count. None = never, for a
    debugger."""
    max_restarts: int = 3
    """How often within an hour the engine may be started again after it died, and the rollout workers together; the
    groups that this cost run again. 0 = a death ends the run."""

    def __post_init__(self) -> None:
        require(
            self.address is None or self.address not in ("", "0.0.0.0", "::"),
            f"address must be one of this machine's own, got {self.address!r}; use null to have it found",
        )
        require(self.nodes >= 1, f"nodes must be >= 1, got {self.nodes}")
        require(self.place_seconds > 0, f"place_seconds must be > 0, got {self.place_seconds}")
        require(self.threads is None or self.threads >= 1, f"threads must be >= 1, got {self.threads}")
        require(self.max_restarts >= 0, f"max_restarts must be >= 0, got {self.max_restarts}; use 0 for none")
        require(
            self.heartbeat_seconds is None or self.heartbeat_seconds >= 2,
            f"heartbeat_seconds must be >= 2, got {self.heartbeat_seconds}; heartbeats come once a second",
        )
