"""How rollout works: how completions are sampled, how episodes are run, and what the proxy allows its clients.

`gconfig` is a GenerationHyperparameters, `rollout` a RolloutConfig with its AgentConfig, `proxy` a ProxyConfig with its
ProxyLimits.
"""

import operator
import os
from dataclasses import dataclass, field, fields, replace
from numbers import Real
from typing import Any, Literal, NoReturn
from urllib.parse import urlsplit

from areal.config.backend import Backend
from areal.config.device import require_device_among, require_device_name
from areal.config.errors import ConfigError, require
from areal.config.keys import ADMIN_KEY_VARIABLE, ENGINE_SECRET_VARIABLE, find_key
from areal.config.resources import Resources
from areal.utils.net import is_loopback
from areal.utils.shorten import shown

GREEDY_BELOW = 1e-4
"""Smaller temperatures are greedy: logits divided by them might leave float32."""
MAX_TEMPERATURE = 3.4e38
"""What float32 holds."""
WhenStale = Literal["wait", "drop", "train"]
Kernel = Literal["auto", "native", "torch"]

URL_SCHEMES = ("http://", "https://")
"""Of the addresses of vLLM's and SGLang's own servers."""
MAX_COUNT = 2**31
"""Of tokens, samples and the like; far more than any model has."""


@dataclass
class GenerationHyperparameters:
    """How completions are sampled."""

    n_samples: int = 1
    """Episodes per task; together they form the group that advantages are computed in."""
    max_new_tokens: int = 512
    """Tokens a completion may have at most, the end token included."""
    min_new_tokens: int = 0
    """Stop tokens are not sampled before this many tokens."""
    greedy: bool = False
    """Take the likeliest token; the same as temperature 0."""
    temperature: float = 1.0
    """Logits are divided by it before a token is drawn; below 1e-4 the likeliest token is taken (see `greedy`)."""
    top_p: float = 1.0
    """Sample among the likeliest tokens that together have this probability, at least one; 1 = all."""
    top_k: int = 0
    """Sample among this many likeliest tokens; 0 = all."""
    stop_token_ids: list[int] = field(default_factory=list)
    """Tokens that end a completion; the one that does is kept."""
    stop: list[str] = field(default_factory=list)
    """Texts that end a completion; the token that completes one is kept."""
    seed: int | None = None
    """Makes one request reproducible; None = a fresh seed for each. Must be empty in training, where every call
    gets its own from the run's `seed`, the task and the sample; one that an agent sets there is combined with these."""

    def __post_init__(self) -> None:
        self.n_samples = _integer("n_samples", self.n_samples, 1)
        self.max_new_tokens = _integer("max_new_tokens", self.max_new_tokens, 1)
        self.min_new_tokens = _integer("min_new_tokens", self.min_new_tokens, 0)
        if self.min_new_tokens > self.max_new_tokens:
            _refuse("min_new_tokens", f"<= max_new_tokens={self.max_new_tokens}", self.min_new_tokens)
        if not isinstance(self.greedy, bool):
            _refuse("greedy", "true or false", self.greedy)
        if not (_is_number(self.temperature) and 0 <= self.temperature <= MAX_TEMPERATURE):
            _refuse("temperature", "a number >= 0 that float32 holds", self.temperature, "; use 0 for greedy")
        if not (_is_number(self.top_p) and 0 < self.top_p <= 1):
            _refuse("top_p", "a number in (0, 1]", self.top_p, "; use 1 for no limit")
        self.temperature = float(self.temperature)
        self.top_p = float(self.top_p)
        self.top_k = _integer("top_k", self.top_k, 0, remedy="; use 0 for no limit")
        if self.seed is not None:
            self.seed = _integer("seed", self.seed, -(2**63), 2**64 - 1)
        if not isinstance(self.stop_token_ids, list | tuple):
            _refuse("stop_token_ids", "a list of integers", self.stop_token_ids)
        self.stop_token_ids = [_integer("stop_token_ids", token, -MAX_COUNT) for token in self.stop_token_ids]
        if not (isinstance(self.stop, list | tuple) and all(isinstance(text, str) for text in self.stop)):
            _refuse("stop", "a list of strings", self.stop)

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is taken, by `greedy` or by a temperature too small to divide by."""
        return self.greedy or self.temperature < GREEDY_BELOW

    @property
    def sampling_temperature(self) -> float:
        """What logits are divided by: a greedy choice is made on undivided ones."""
        return 1.0 if self.is_greedy else self.temperature

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


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _integer(name: str, value: Any, low: int, high: int = MAX_COUNT, remedy: str = "") -> int:
    """The value as Python's own integer, in [low, high]."""
    if type(value) is int and low <= value <= high:
        return value
    whole = hasattr(value, "__index__") and not isinstance(value, bool)
    if not (whole and low <= operator.index(value) <= high):
        _refuse(name, f"an integer in [{low}, {high}]", value, remedy)
    return operator.index(value)


def _refuse(name: str, rule: str, value: Any, remedy: str = "") -> NoReturn:
    """Settings are checked at every call of a model, so a message is made only when one is refused."""
    raise ConfigError(f"{name} must be {rule}, got {shown(value)}{remedy}")


@dataclass
class ProxyLimits:
    """Limits that keep one client of the proxy from starving others."""

    max_sessions: int = 10_000
    """Sessions open at once."""
    max_calls_per_session: int = 64
    """Calls of one session running at once; one more is answered 429."""
    max_tokens_per_session: int | None = None
    """Tokens that the calls of one session may use, prompts and answers together; a call that might use more is
    answered 429. None = no limit."""
    max_body_bytes: int = 16 * 2**20
    """Size of a request's body; a bigger one is answered 413."""
    max_choices: int = 128
    """Largest `n` of one request."""
    body_timeout_seconds: float = 30.0
    """Seconds a client may take to send the head of a request, and again for its body."""
    call_timeout_seconds: float = 3600.0
    """Seconds the engine may take for one call; a longer one is answered 503."""
    session_timeout_seconds: float = 3600.0
    """Seconds that a session opened over HTTP may stay open before the proxy ends it."""
    reward_timeout_seconds: float = 600.0
    """Seconds after such a session ends in which its reward may still arrive."""
    remembered_answers: int = 64
    """Answers of a session that a retry gets again; a retry of an older call is a new sample."""
    remembered_ended_sessions: int = 10_000
    """Ended sessions whose keys are answered 410; older keys are answered 401, like unknown ones."""

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
    """The proxy that agents call the model through."""

    host: str = "127.0.0.1"
    """Address that the proxy of a rollout worker listens on; one that is not loopback needs an admin key."""
    port: int = 0
    """0 = a free one for each worker."""
    admin_key: str = ""
    """The key that manages sessions over HTTP and cannot call the model; empty = that of `admin_key_file`, else that of
    the environment variable AREAL_ADMIN_KEY, else one is made for the run."""
    admin_key_file: str = ""
    """A file with the admin key, which then is on no command line; empty = none."""
    public_url: str = ""
    """Where agents reach the proxy if that is not the address it listens on (behind TLS, or under another name), e.g.
    https://rollout.example; empty = the address they connected to."""
    drop_params: bool = False
    """Ignore request parameters that cannot be honoured, with a line in the log, instead of answering 400."""
    tool_parser: str | None = None
    """How the model writes tool calls: hermes, qwen3_coder, llama3, mistral, …; None = found from its chat template."""
    reasoning_parser: str | None = None
    """How it marks reasoning: think, mistral, or none = reasoning is text; None = found from its chat template."""
    limits: ProxyLimits = field(default_factory=ProxyLimits)
    """Limits that keep one client from starving others."""

    def __post_init__(self) -> None:
        require(0 <= self.port < 65536, f"port must lie in [0, 65535], got {self.port}; use 0 for a free one")
        require(
            not (self.admin_key and self.admin_key_file),
            f"admin_key or admin_key_file may be set, got both ({self.admin_key_file}); leave one out",
        )
        require(
            is_loopback(self.host) or bool(self.admin_key or self.admin_key_file or ADMIN_KEY_VARIABLE in os.environ),
            f"host={self.host} can be reached from other machines and needs an admin_key, an admin_key_file or "
            f"{ADMIN_KEY_VARIABLE}; set one, or use 127.0.0.1",
        )
        require(
            not self.public_url or urlsplit(self.public_url).scheme in ("http", "https"),
            f"public_url must be http://HOST or https://HOST, got {self.public_url!r}",
        )

    def with_key(self) -> "ProxyConfig":
        """A copy whose `admin_key` is the one that the user chose, wherever it is; empty = none was chosen."""
        key = find_key(self.admin_key or None, self.admin_key_file or None, ADMIN_KEY_VARIABLE, "proxy.admin_key")
        return replace(self, admin_key=key, admin_key_file="")


@dataclass
class AgentConfig:
    """Where and how the episodes of an agent run."""

    mode: Literal["inline", "subproc", "online"] = "inline"
    """Where an agent runs: inline = in the rollout worker's event loop; subproc = in processes that may be killed;
    online = outside this system, asking for sessions over HTTP."""
    self_reward: bool = False
    """Mode online: a session's own key may reward and end the session; otherwise only the admin key may."""
    subproc_max_workers: int = 4
    """Mode subproc: processes of each rollout worker, each with one episode at a time."""
    timeout_seconds: float = 600.0
    """Seconds; an episode that takes longer is cancelled and rejected as `timeout`."""
    turn_discount: float = 1.0
    """Factor on a later turn's return as part of the return of the turn before it."""
    export_style: Literal["individual", "concat"] = "individual"
    """individual = a training row per completion; concat = a row per leaf of the conversation tree."""

    def __post_init__(self) -> None:
        require(self.subproc_max_workers >= 1, f"subproc_max_workers must be >= 1, got {self.subproc_max_workers}")
        require(self.timeout_seconds > 0, f"timeout_seconds must be > 0 seconds, got {self.timeout_seconds}")
        require(0 <= self.turn_discount <= 1, f"turn_discount must lie in [0, 1], got {self.turn_discount}")


@dataclass
class RolloutConfig(Resources):
    """How many episodes run, how far they may lag behind the policy, and where; and what each engine server needs."""

    max_head_offpolicyness: int = 2
    """How many versions a trained sample may lag behind the policy; 0 = synchronous."""
    when_stale: WhenStale = "wait"
    """What happens to groups that would lag further: wait = a batch waits for those that are about to, so that none is
    lost and long episodes are trained as often as they occur; drop = they are rejected, which removes the longest;
    train = they are trained, however old, which needs the decoupled loss (actor.use_decoupled_loss)."""
    max_concurrent_rollouts: int = 256
    """Episodes running at once."""
    max_idle_rejections: int = 64
    """Episodes at the start that may all fail alike (for one reason, at one line of code), of an evaluation or of
    training, before the run stops with the cause and its traceback. Where something was accepted before, or they fail
    in several ways, are filtered or too old: eight times as many in a row, with none accepted."""
    num_workers: int = 1
    """Processes that run episodes."""
    backend: str = "embedded"
    """The engine that serves the model: embedded, vllm or sglang; with `:dNtM`, N servers of M GPUs each, e.g.
    embedded:d2 or vllm:d2t4. They share the episodes, and one that dies is replaced while the others go on."""
    python: str = ""
    """The interpreter that has vLLM or SGLang, which cannot share an environment with this package; empty = the present
    one."""
    engine_args: list[str] = field(default_factory=list)
    """Further arguments of vLLM's or SGLang's server, e.g. [--max-model-len, "32768"]."""
    addresses: list[str] = field(default_factory=list)
    """Servers that run already, in place of those that `backend` starts; empty = none run. Either engine servers of
    this package, as unix:PATH or tcp:HOST:PORT, started by `python -m areal.engine.inference.server MODEL --listen
    ADDRESS`; or, with backend=vllm or sglang, servers of vLLM or SGLang, as http://HOST:PORT."""
    secret_file: str = ""
    """A file with the secret of the servers at `addresses`; empty = that of the environment variable
    AREAL_ENGINE_SECRET."""
    device: str = "auto"
    """Where the embedded engine computes: cpu, cuda, cuda:N or mps; auto = cuda if there is one, else mps, else cpu.
    Several engines on cuda have a GPU each; on other machines than the driver's, auto needs `gpus` for that."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """What the engine computes in, and what weights are published in. Log-probs are the trainer's in float32 only; with
    bfloat16 the trainer recomputes them (actor.recompute_logprob)."""
    kernel: Kernel = "auto"
    """What computes the embedded engine's steps for models that this package's decoder knows: native = C++ on a CPU,
    compiled on first use; torch = torch, on any device; auto = native on a CPU where it can be had, else torch."""
    in_process: bool = False
    """Run the episodes inside the driver, for breakpoints and tests."""
    stall_seconds: float | None = 0.5
    """Code that blocks a worker's event loop for longer than this many seconds is reported with its line; None = the
    loop is not watched."""
    tracing: bool = False
    """Send OpenTelemetry spans of episodes, model calls, tools and rewards to where OTEL_EXPORTER_OTLP_ENDPOINT says;
    needs the extra `otel`."""
    agent: AgentConfig = field(default_factory=AgentConfig)
    """How agents run, and how long an episode may take."""

    @property
    def rounds(self) -> int:
        """How many rounds the episodes of a worker may need: in mode subproc, a process runs one at a time."""
        if self.agent.mode != "subproc":
            return 1
        return -(-self.max_concurrent_rollouts // self.agent.subproc_max_workers)

    @property
    def server_urls(self) -> list[str]:
        """The vLLM or SGLang servers among `addresses`, each of which gets an engine process of the run."""
        return [address for address in self.addresses if address.startswith(URL_SCHEMES)]

    @property
    def foreign_engines(self) -> bool:
        """Whether an engine may be vLLM or SGLang, which cannot tell the digest of their weights. What kind an engine
        server at `addresses` holds, only it knows."""
        return bool(self.addresses) or Backend.parse(self.backend).kind != "embedded"

    @property
    def engine_secret(self) -> bytes:
        """Of the servers at `addresses`; empty = they have none."""
        return find_key(None, self.secret_file or None, ENGINE_SECRET_VARIABLE, "rollout.secret_file").encode()

    def __post_init__(self) -> None:
        super().__post_init__()
        require_device_name("device", self.device)
        require_device_among(self.gpus, self.device)
        servers = Backend.parse(self.backend).servers
        require(
            servers == 1 or self.gpus is not None or not self.device.startswith("cuda:"),
            f"engines must have a GPU each, got device={self.device} for the {servers} of backend={self.backend}; "
            "use cuda, which gives each of them its own",
        )
        require(
            self.kernel != "native" or self.device in ("auto", "cpu"),
            f"kernel=native computes on CPUs, got device={self.device}; use kernel=auto",
        )
        self._check_addresses()
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
            f"agent.mode=online gives all agents one address, got num_workers={self.num_workers}; set it to 1",
        )
        require(
            not self.in_process or self.num_workers == 1,
            f"in_process runs one worker inside the driver, got num_workers={self.num_workers}; set it to 1",
        )

    def _check_addresses(self) -> None:
        urls, backend = self.server_urls, self.backend
        for address in self.addresses:
            require(
                address in urls or address.startswith(("unix:", "tcp:")),
                f"addresses must be unix:PATH, tcp:HOST:PORT or, of vLLM or SGLang, http://HOST:PORT, got {address!r}",
            )
        require(
            not urls or len(urls) == len(self.addresses),
            f"addresses must be those of engine servers, or of vLLM or SGLang, got both: {', '.join(self.addresses)}",
        )
        require(
            not urls or backend in ("vllm", "sglang"),
            f"the servers at {', '.join(urls)} need backend=vllm or backend=sglang, whichever they are, got {backend}",
        )
        require(
            not self.addresses or bool(urls) or backend == "embedded",
            f"the servers at addresses are what they are, got backend={backend} too; leave one of them out",
        )
