"""The model that is trained and how it is optimised, and what happens around the steps.

Around them are evaluation, checkpoints, recovery and placement.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from areal.config.algorithm import Unset
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


_RANGES: dict[str, tuple[Callable[[float], bool], str]] = {
    "eps_clip": (lambda value: 0 < value <= 1, "lie in (0, 1], got {value}; use 1 for no bound below"),
    "eps_clip_higher": (lambda value: value > 0, "be > 0, got {value}; leave it out to use eps_clip"),
    "dual_clip": (lambda value: value > 1, "be > 1, got {value}; use null for no bound"),
    "behave_imp_weight_cap": (lambda value: value > 0, "be > 0, got {value}; use null for no cap"),
    "behave_imp_weight_floor": (lambda value: value > 0, "be > 0, got {value}; use null for no floor"),
    "second_moment": (lambda value: value > 0, "be > 0, got {value}; use null for no bound"),
    "negative_mask": (lambda value: value >= 0, "be >= 0, got {value}; use null for no mask"),
    "sapo_temperature": (lambda value: value > 0, "be > 0, got {value}"),
    "sapo_temperature_negative": (lambda value: value > 0, "be > 0, got {value}"),
    "gae_lambda": (lambda value: 0 <= value <= 1, "lie in [0, 1], got {value}"),
    "discount": (lambda value: 0 <= value <= 1, "lie in [0, 1], got {value}"),
    "overlong_share": (lambda value: 0 <= value <= 1, "lie in [0, 1], got {value}; use 0 for no penalty"),
    "kl_ctl": (lambda value: 0 <= value < math.inf, "be >= 0 and finite, got {value}"),
    "entropy_coef": (lambda value: 0 <= value < math.inf, "be >= 0 and finite, got {value}"),
    "loss_length": (lambda value: value >= 1, "be >= 1, got {value}"),
}
"""Of settings of the algorithm: whether a value fits, and the rule."""


@dataclass
class LoraConfig:
    """A low-rank adapter that is trained in place of the model: docs/lora.md."""

    rank: int | None = None
    """Rows of A and columns of B, in each layer that computes with W + alpha / rank * B A; None = no adapter, the whole
    model is trained."""
    alpha: float | None = None
    """What B A is multiplied by, times the rank; None = twice the rank."""
    targets: list[str] = field(default_factory=list)
    """Ends of the names of linear layers that get one, e.g. [q_proj, v_proj]; empty = all of them but the head."""
    path: str = ""
    """A directory with an adapter of PEFT's format to begin with, of this rank, alpha and targets; empty = a new one,
    which changes nothing yet."""

    def __post_init__(self) -> None:
        require(
            self.rank is None or self.rank >= 1,
            f"rank must be >= 1, got {self.rank}; leave it out to train the whole model",
        )
        require(
            self.alpha is None or 0 < self.alpha < math.inf,
            f"alpha must be a finite number > 0, got {self.alpha}; leave it out for twice the rank",
        )
        given = [name for name in ("alpha", "targets", "path") if getattr(self, name)]
        require(
            self.rank is not None or not given,
            f"{' and '.join(given)} of an adapter without a rank; set rank, e.g. to 16, or leave all of lora out",
        )

    @property
    def scaled_alpha(self) -> float:
        assert self.rank is not None, "there is an adapter"
        return 2.0 * self.rank if self.alpha is None else self.alpha


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
    lora: LoraConfig = field(default_factory=LoraConfig)
    """Train an adapter in place of the model."""
    max_tokens_per_mb: int = 16384
    """Tokens in one forward and backward pass; bounds the memory and does not change the result."""
    gradient_checkpointing: bool = False
    """Recompute each layer in the backward pass instead of keeping its activations: less memory, more time."""
    ppo_n_minibatches: int = 1
    """Optimizer steps per batch."""
    algorithm: str = ""
    """A preset: default, decoupled, grpo, dr_grpo, dapo, rloo, reinforce++, gspo, cispo, sapo, ppo or m2po; one with
    the clipped objective may have +decoupled after it, as in dapo+decoupled. It fills in the settings below that are
    left at `preset`, and no others (docs/algorithms.md). Empty = decoupled where rollout.max_head_offpolicyness >= 1,
    else default."""
    advantage: str | Unset = "preset"
    """How returns become advantages: baseline = by `group_baseline` and `adv_norm`; or a function's import string."""
    group_baseline: Literal["mean", "leave_one_out", "batch", "none", "preset"] = "preset"
    """What a return is compared with: the mean over the completions of its group, the mean over the other episodes of
    its group, the mean over the completions of the batch, or nothing."""
    adv_norm: Literal["none", "group", "batch", "preset"] = "preset"
    """What the advantage is divided by: nothing, or its group's or the batch's standard deviation over completions
    (unbiased: n - 1), plus 1e-6. Where the deviation is 0, so is the advantage."""
    gae_lambda: float | Unset = "preset"
    """With a critic: how much of what it failed to predict counts for the tokens before; 1 = the advantage is the
    return minus the value, 0 = the next value minus this one."""
    gae_over: Literal["completion", "episode", "preset"] = "preset"
    """With a critic: what comes after the last token of a completion. completion = its return, in which later turns
    have their share; episode = the reward of its own and the value before the next turn, so that gae_lambda counts
    across turns."""
    discount: float | Unset = "preset"
    """With a critic: what the return counts less for each token that was still to come. Turns have one of their own
    (rollout.agent.turn_discount)."""
    overlong_share: float | Unset = "preset"
    """Over the last share of gconfig.max_new_tokens, so large, the return of a completion falls linearly by 1; 0 = the
    length costs nothing."""
    ratio: str | Unset = "preset"
    """Of which the policy's ratio is taken: token, or sequence = the geometric mean over a completion; or a function's
    import string."""
    objective: str | Unset = "preset"
    """What is maximised, with ratio r and advantage A: clip = the lesser of r A and clipped r A; importance = r A;
    cispo = A log p weighed by the clipped r; sapo = a sigmoid of r times A; reinforce = A log p; or a function's
    import string."""
    eps_clip: float | Unset = "preset"
    """The policy ratio is clipped below 1 - eps_clip; 1 = not at all."""
    eps_clip_higher: float | Unset | None = "preset"
    """The policy ratio is clipped above 1 + this; None = eps_clip."""
    dual_clip: float | Unset | None = "preset"
    """The loss of a token with a negative advantage A is at most this times |A|, however much likelier the token has
    become; None = not bounded."""
    sapo_temperature: float | Unset = "preset"
    """objective=sapo: the steepness of the sigmoid for positive advantages."""
    sapo_temperature_negative: float | Unset = "preset"
    """objective=sapo: the same for the others."""
    use_decoupled_loss: bool | Unset = "preset"
    """Clip around recomputed log-probs of the policy before the update, and weight by their ratio to the sampler's."""
    correction: str | Unset = "preset"
    """Decoupled loss: of which that weight is taken: token; sequence = the product over a completion; geometric = its
    geometric mean; or a function's import string."""
    correction_bound: Literal["mask", "truncate", "preset"] = "preset"
    """Decoupled loss: what becomes of weights beyond behave_imp_weight_cap and _floor: the tokens are left out, or the
    weight is held there."""
    behave_imp_weight_cap: float | Unset | None = "preset"
    """Decoupled loss: the largest weight; None = not bounded."""
    behave_imp_weight_floor: float | Unset | None = "preset"
    """Decoupled loss: the smallest weight; None = not bounded."""
    second_moment: float | Unset | None = "preset"
    """Decoupled loss: tokens that a clip could hold are left out, those of the largest log-weights first, until the
    mean of the squared log-weights is at most this; None = none are."""
    negative_mask: float | Unset | None = "preset"
    """Decoupled loss: completions with a negative advantage are left out if the sampler's mean log-prob exceeds the
    policy's by more than this; None = none are."""
    kl_ctl: float | Unset = "preset"
    """Weight of the KL penalty against the reference model `ref.path`. A preset's applies where there is one."""
    kl: str | Unset = "preset"
    """The estimate of that KL: k1, k2, k3 or k3_corrected; or a function's import string."""
    kl_in: Literal["loss", "reward", "token_reward", "preset"] = "preset"
    """Where the penalty is: in the loss, in the return of a completion as a whole, or in the returns token by token,
    where each pays for itself and what follows."""
    entropy_coef: float | Unset = "preset"
    """Weight of an entropy bonus, estimated from the sampled tokens."""
    loss_norm: str | Unset = "preset"
    """The loss is a mean over tokens, over completions, each with the mean of its tokens, or over episodes; or constant
    = the sum over tokens divided by the completions and by loss_length; or a function's import string."""
    loss_length: int | Unset = "preset"
    """loss_norm=constant: the length that every completion is taken to have; by default gconfig.max_new_tokens."""
    dynamic_sampling: bool | Unset = "preset"
    """Groups whose rewards are all equal are dropped, and other tasks take their place in the batch."""
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
        self._check_algorithm()
        require(self.max_tokens_per_mb >= 1, f"max_tokens_per_mb must be >= 1, got {self.max_tokens_per_mb}")
        require(self.ppo_n_minibatches >= 1, f"ppo_n_minibatches must be >= 1, got {self.ppo_n_minibatches}")

    def _check_algorithm(self) -> None:
        """Values by themselves; `Algorithm.check` knows combinations."""
        for name, (fits, rule) in _RANGES.items():
            value = getattr(self, name)
            require(value in (None, "preset") or fits(value), f"{name} must {rule.format(value=value)}")


@dataclass
class ReferenceConfig:
    """The reference model of the KL penalty."""

    path: str = ""
    """The frozen model that the KL penalty compares with, usually the same as actor.path; empty = none. For DPO: what
    log-ratios are taken to; empty = the model that the run starts from."""
    offload: bool = False
    """Between two batches its weights are in the host's memory, and not in that of the device."""


@dataclass
class TeacherConfig:
    """The model that the policy is distilled from, on what it samples itself."""

    path: str = ""
    """The frozen teacher, which has the policy's tokenizer; empty = none. It is computed where the actor is."""
    weight: float = 1.0
    """What log teacher - log policy of a token counts as its advantage."""
    discount: float = 0.0
    """What the tokens that follow count for a token, each less by this factor: 0 = nothing, 1 = the reverse KL of whole
    completions is minimised."""
    with_rewards: bool = False
    """Rewards teach too: their advantages are added. False = they are only written down."""
    offload: bool = False
    """Between two batches its weights are in the host's memory, and not in that of the device."""

    def __post_init__(self) -> None:
        require(0 < self.weight < math.inf, f"weight must be > 0, got {self.weight}; leave path empty for no teacher")
        require(0 <= self.discount <= 1, f"discount must lie in [0, 1], got {self.discount}")

    @property
    def alone(self) -> bool:
        """Nothing else teaches."""
        return self.path != "" and not self.with_rewards


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


TRACKERS = ("wandb", "mlflow", "trackio", "swanlab")


@dataclass
class TrackingConfig:
    """What the trackers of a run are told: docs/trackers.md."""

    project: str = ""
    """The project, or MLflow's experiment, that the run belongs to; empty = experiment_name."""
    name: str = ""
    """The run's name there; empty = that of its directory, which is trial_name."""
    offline: bool = False
    """Write files in the run's directory and send nothing."""
    rollouts_every: int | None = 20
    """After the first step and every this many, some conversations are shown; None = never."""
    rollouts: int = 4
    """How many."""

    def __post_init__(self) -> None:
        require(
            self.rollouts_every is None or self.rollouts_every >= 1,
            f"rollouts_every must be >= 1, got {self.rollouts_every}; use null for never",
        )
        require(self.rollouts >= 1, f"rollouts must be >= 1, got {self.rollouts}")


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
