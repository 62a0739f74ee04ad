"""A model and the machines it is trained on, on paper: from a small YAML file to the speeds that are simulated.

Nothing here was measured on a GPU. Speeds follow from data sheets and from assumed shares of what these promise:

    a rank          tokens/s = FLOP/s · MFU / (FLOP per parameter and token · parameters)
    a lone request  tokens/s = memory bandwidth · its share / bytes of the weights
    a full engine   s/token  = 2 · parameters / (FLOP/s · share) + bytes of a request's keys and values / bandwidth

`examples/simulation/h100-7b.yaml` says of every figure where it comes from. `Machines.plan` divides a number of GPUs
between engines and ranks.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from areal.api.errors import ConfigError, TraceError
from areal.config.parallel import Ranks
from areal.config.yaml import Verbatim, read_mapping
from areal.simulation.failures import Checkpoints, Failures
from areal.simulation.fanout import FanOut
from areal.simulation.ranks import RankSpeed
from areal.simulation.scenario import DriverSpeed, Scenario
from areal.simulation.trace import ClientSpeed, EngineSpeed, Trace, numbers_of

WORKER_SHARE = 0.6
"""How busy the planned rollout workers are on average: more, and episodes wait for each other."""
GROUP_TAIL = 1.5
"""Episodes admitted for each that generates or waits: a group counts until its last episode ends."""
TENSOR_COLLECTIVES = 4
"""Of a layer in a forward and a backward pass."""


@dataclass(frozen=True)
class Model:
    parameters: float
    layers: float
    hidden: float
    kv_bytes_per_token: float
    """Keys and values of a token, in all layers."""
    context_tokens: float
    """That a request has on average while it is decoded."""
    prompt_tokens: float = 0.0
    """Of an episode."""
    bytes_per_parameter: float = 2.0
    """As engines compute and as ranks gather."""
    training_bytes_per_parameter: float = 16.0
    """Parameter, gradient and two moments of Adam, in float32."""


@dataclass(frozen=True)
class Gpu:
    flop_per_second: float
    memory_bytes: float
    memory_bytes_per_second: float
    link_bytes_per_second: float
    """To the GPUs of the same host, in each direction."""
    training_mfu: float = 0.4
    decoding_mfu: float = 0.5
    prefill_mfu: float = 0.5
    """Shares of `flop_per_second` that are reached."""
    memory_share: float = 0.7
    """Of `memory_bytes_per_second`, when weights, keys and values are read."""
    room_share: float = 0.9
    """Of `memory_bytes`, that may be used."""
    flop_per_parameter_and_token: float = 8.0
    """6 to train; 2 more for log-probs that are computed again, 2 more with gradient_checkpointing."""
    gathers_per_pass: float = 3.0
    """How often FSDP gathers the parameters: for the forward, the backward and the log-probs' pass."""


@dataclass(frozen=True)
class Host:
    gpus: float = 8.0
    network_bytes_per_second: float = 50e9
    """In each direction, of all its GPUs together."""


@dataclass(frozen=True)
class Settings:
    """Those of a run that are the same at every size."""

    pass_tokens: float = 16384.0
    """`actor.max_tokens_per_mb`."""
    gpus_per_engine: float = 1.0
    """The `t` of `rollout.backend`."""
    tensor: float = 1.0
    """The `t` of `actor.backend`."""
    requests_per_engine: float = 64.0
    """That the planned `rollout.max_concurrent_rollouts` gives each engine."""
    overlap: float = 0.5
    """Share of the ranks' communication that is hidden behind computing."""


@dataclass(frozen=True)
class Weights:
    from_ranks: bool = True
    """Each rank's host serves what it wrote; otherwise the driver serves everything."""
    bytes_per_parameter: float = 4.0
    while_training: bool = False
    """A what-if, as in FanOut."""
    processes_per_host: float = 1.0
    """A what-if: so many fetch and check a version together."""
    swap_seconds: float = 0.0
    write_byte_seconds: float = 0.0
    serve_byte_seconds: float = 0.0
    fetch_byte_seconds: float = 0.0
    check_byte_seconds: float = 0.0


@dataclass(frozen=True)
class Saving:
    steps: float = 0.0
    """`saver.freq_steps`; 0 = nothing is saved."""
    bytes_per_parameter: float = 12.0
    copy_bytes_per_second: float = 25e9
    """From a GPU to its host's memory."""
    disk_bytes_per_second: float = 10e9
    """Of the shared file system."""


@dataclass(frozen=True)
class Machines:
    model: Model
    gpu: Gpu
    host: Host = field(default_factory=Host)
    settings: Settings = field(default_factory=Settings)
    weights: Weights = field(default_factory=Weights)
    client: ClientSpeed = field(default_factory=ClientSpeed)
    driver: DriverSpeed = field(default_factory=DriverSpeed)
    checkpoints: Saving = field(default_factory=Saving)
    failures: Failures = field(default_factory=Failures)

    @classmethod
    def read(cls, path: str, changes: Sequence[str] = ()) -> "Machines":
        """`changes` such as `weights.bytes_per_parameter=2`. Raises ConfigError."""
        sections = read_mapping(path)
        for change in changes:
            name, _, value = change.partition("=")
            section, _, key = name.partition(".")
            if not (key and value) or not isinstance(sections.setdefault(section, {}), dict):
                raise ConfigError(f"a change must be section.name=value, got {change!r}")
            sections[section][key] = Verbatim(value).parsed()
        kinds: dict[str, Any] = {each.name: each.type for each in fields(cls)}
        if unknown := sorted(set(sections) - set(kinds)):
            raise ConfigError(f"{path} has no use for {', '.join(unknown)}; it knows {', '.join(kinds)}")
        try:
            return cls(**{name: numbers_of(kinds[name], values, name) for name, values in sections.items()})
        except TypeError:
            raise ConfigError(f"{path} must have the sections model and gpu, got {', '.join(sections)}") from None
        except TraceError as error:
            raise ConfigError(f"{path}: {error}") from None

    @property
    def engine(self) -> EngineSpeed:
        """One, on its GPUs."""
        model, gpu, count = self.model, self.gpu, self.settings.gpus_per_engine
        bandwidth = gpu.memory_bytes_per_second * gpu.memory_share * count
        arithmetic = gpu.flop_per_second * count
        cached = model.context_tokens * model.kv_bytes_per_token / bandwidth
        return EngineSpeed(
            alone_tokens_per_second=bandwidth / (model.parameters * model.bytes_per_parameter),
            full_tokens_per_second=1 / (2 * model.parameters / (arithmetic * gpu.decoding_mfu) + cached),
            swap_seconds=self.weights.swap_seconds,
            recompute_token_seconds=2 * model.parameters / (arithmetic * gpu.prefill_mfu),
        )

    @property
    def engine_room(self) -> float:
        """Requests whose keys and values fit beside the weights."""
        model, gpus = self.model, self.settings.gpus_per_engine
        free = self.gpu.memory_bytes * self.gpu.room_share * gpus - model.parameters * model.bytes_per_parameter
        return max(0.0, free / (model.context_tokens * model.kv_bytes_per_token))

    @property
    def fewest_ranks(self) -> int:
        """That have room for the model's training state; activations come on top."""
        state = self.model.parameters * self.model.training_bytes_per_parameter
        return math.ceil(state / (self.gpu.memory_bytes * self.gpu.room_share))

    def rank_speed(self, ranks: Ranks) -> RankSpeed:
        model, gpu, settings = self.model, self.gpu, self.settings
        several = ranks.count > self.host.gpus
        return RankSpeed(
            ranks,
            tokens_per_second=gpu.flop_per_second
            * gpu.training_mfu
            / (gpu.flop_per_parameter_and_token * model.parameters),
            pass_tokens=settings.pass_tokens,
            # Parameters as they are computed with, and gradients in float32.
            pass_bytes=model.parameters * (gpu.gathers_per_pass * model.bytes_per_parameter + 4),
            pass_bytes_per_second=self.host.network_bytes_per_second
            if several
            else gpu.link_bytes_per_second * ranks.tensor,
            tensor_bytes_per_token=TENSOR_COLLECTIVES * model.layers * model.hidden * model.bytes_per_parameter,
            tensor_bytes_per_second=gpu.link_bytes_per_second,
            overlap=settings.overlap,
        )

    def scenario(self, trace: Trace, engines: int, ranks: Ranks, **settings: Any) -> Scenario:
        """`settings`: the other fields of a Scenario."""
        engine_gpus = engines * self.settings.gpus_per_engine
        one_host = engine_gpus + ranks.count <= self.host.gpus
        engine_hosts = math.ceil(engine_gpus / self.host.gpus)
        rank_hosts = math.ceil(ranks.count / self.host.gpus)
        return Scenario(
            replace(trace, engine=self.engine, client=self.client),
            engines=engines,
            ranks=self.rank_speed(ranks),
            rank_hosts=rank_hosts,
            gpus_per_engine=int(self.settings.gpus_per_engine),
            engines_per_host=max(1, int(self.host.gpus // self.settings.gpus_per_engine)),
            prompt_tokens=self.model.prompt_tokens,
            fan_out=self._fan_out(0 if one_host else engine_hosts, ranks, rank_hosts),
            driver=self.driver,
            checkpoints=self._checkpoints(ranks),
            failures=self.failures,
            **settings,
        )

    def plan(self, trace: Trace, gpus: int, *, batch_size: int, n_samples: int, eta: int, steps: int) -> Scenario:
        """The division of so many GPUs that makes the slower of generating and training fastest, and what fits it."""
        each, tensor = int(self.settings.gpus_per_engine), int(self.settings.tensor)
        unit = int(self.host.gpus) if gpus >= 2 * self.host.gpus else tensor
        tokens = sum(turn.tokens for turns in trace.episodes for turn in turns) / len(trace.episodes)
        requests = min(self.settings.requests_per_engine, self.engine_room)
        speed = self.engine
        rate = requests / (1 / speed.alone_tokens_per_second + requests / speed.full_tokens_per_second)
        episodes = batch_size * n_samples

        def step_seconds(count: int) -> float:
            engines, ranks = (gpus - count) // each, Ranks(count // tensor, tensor)
            scenario = self.scenario(trace, engines, ranks)
            assert scenario.ranks is not None
            time = scenario.ranks.step([tokens + self.model.prompt_tokens] * episodes)
            fan_out = scenario.fan_out
            publishing = 0.0 if fan_out.while_training else fan_out.write_seconds + fan_out.stage_seconds()
            training = time.computing + time.communicating + publishing + speed.swap_seconds
            return max(training, episodes * tokens / (engines * rate))

        choices = [count for count in range(unit, gpus - each + 1, unit) if count >= self.fewest_ranks]
        if not choices:
            raise ConfigError(
                f"the training state of the model needs {self.fewest_ranks} GPUs, and an engine {each} more, got {gpus}"
            )
        count = min(choices, key=step_seconds)
        engines = (gpus - count) // each
        waiting = sum(turn.wait_seconds for turns in trace.episodes for turn in turns) / len(trace.episodes)
        generating = tokens * requests / rate
        calls = engines * rate / tokens * sum(map(len, trace.episodes)) / len(trace.episodes)
        per_call = self.client.call_seconds + self.client.token_seconds * rate * engines / max(calls, 1e-9)
        return self.scenario(
            trace,
            engines,
            Ranks(count // tensor, tensor),
            workers=max(1, math.ceil(calls * per_call / WORKER_SHARE)),
            batch_size=batch_size,
            n_samples=n_samples,
            max_head_offpolicyness=eta,
            max_concurrent_rollouts=max(n_samples, round(engines * requests * (1 + waiting / generating) * GROUP_TAIL)),
            steps=steps,
        )

    def _fan_out(self, hosts: int, ranks: Ranks, rank_hosts: int) -> FanOut:
        weights, network = self.weights, self.host.network_bytes_per_second
        size = self.model.parameters * weights.bytes_per_parameter
        return FanOut(
            size_bytes=size,
            hosts=hosts,
            from_ranks=weights.from_ranks,
            sources=ranks.count if weights.from_ranks else 1,
            source_hosts=rank_hosts if weights.from_ranks else 1,
            host_bytes_per_second=network,
            write_byte_seconds=weights.write_byte_seconds,
            gather_seconds=size / network if rank_hosts > 1 else size / self.gpu.link_bytes_per_second,
            serve_byte_seconds=weights.serve_byte_seconds,
            fetch_byte_seconds=weights.fetch_byte_seconds / weights.processes_per_host,
            check_byte_seconds=weights.check_byte_seconds / weights.processes_per_host,
            while_training=weights.while_training,
        )

    def _checkpoints(self, ranks: Ranks) -> Checkpoints:
        saving = self.checkpoints
        size = self.model.parameters * saving.bytes_per_parameter
        return Checkpoints(
            int(saving.steps) or None,
            pause_seconds=size / ranks.count / saving.copy_bytes_per_second,
            write_seconds=size / saving.disk_bytes_per_second,
        )
