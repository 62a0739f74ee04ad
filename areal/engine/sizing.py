"""Will a run fit? Adds up what its processes need of each device and host, and finds settings under which it would fit.

`plan` sums the terms of `memory.py` for a config on a machine, which may be one that is not here. `remedies` changes a
setting, or a few, and plans again: what it names would fit. Nothing is started and no torch loaded.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

from areal.api.errors import ConfigError
from areal.config.backend import Backend
from areal.config.experiment import ExperimentConfig, PPOConfig
from areal.config.parallel import Ranks
from areal.config.training import ActorConfig
from areal.engine.memory import (
    FLOAT_BYTES,
    MOMENTS,
    AdapterSize,
    Serving,
    Terms,
    Training,
    embedded_terms,
    frozen_bytes,
    heap_bytes,
    kv_token_bytes,
    pass_terms,
    server_terms,
    state_terms,
    trained_parameters,
    trie_tokens,
)
from areal.engine.model.architecture import FAMILIES
from areal.engine.model.shape import ModelShape

GIB = 1 << 30
HOST_RUNTIME_BYTES = int(0.35 * GIB)
"""Interpreter and torch of a process that computes, resident: 0.31 GiB measured, before any model."""
WORKER_BYTES = int(0.3 * GIB)
"""A rollout worker: no torch, but the SDKs that agents import."""
GPU_RUNTIME_BYTES = int(0.6 * GIB)
"""CUDA's context and the libraries' work spaces. An assumption: nothing was run on a GPU."""
USABLE_SHARE = 0.95
"""Of a device or a host: allocators need room to move."""
FROZEN = {"ref": "reference", "teacher": "teacher"}
"""Sections of models that are not trained, and what their memory is called."""
PUBLISHED_VERSIONS = 2
UTILISATION = {
    "vllm": (("--gpu-memory-utilization",), 0.9),
    "sglang": (("--mem-fraction-static",), 0.88),
}
"""What share of a GPU each takes, and the argument that says so."""
LENGTH_ARGUMENTS = {"vllm": "--max-model-len", "sglang": "--context-length"}
CPU_CACHE_BYTES = 1 * GIB
"""Of vLLM's CPU build, as inference/vllm.py sets it."""
LARGEST_MESH = 1024
FEWEST_TOKENS = 512
"""No pass is advised to be smaller."""
MOST_REMEDIES = 3
MOST_CHANGES = 3
"""Of one remedy."""
SHARED_GPU = "the GPU of trainer and engine"


@dataclass(frozen=True)
class HostMemory:
    """What one host has. All hosts of a run are taken to be alike."""

    host_bytes: int
    shm_bytes: int
    """Room in shared memory."""
    gpu_bytes: int = 0
    """Of each GPU; 0 = there is none, and everything is computed in the host's memory."""
    gpus_per_node: int = 1


@dataclass(frozen=True)
class Demand:
    """What is needed of one kind of place."""

    place: str
    terms: Terms
    limit: int | None
    """What the place has; None = it is a part of the host's memory, where it counts."""
    count: int = 1
    """How many such places there are."""
    note: str = ""

    @property
    def total(self) -> int:
        return sum(self.terms.values())

    @property
    def fits(self) -> bool:
        return self.limit is None or self.total <= self.limit


@dataclass(frozen=True)
class Plan:
    demands: list[Demand]
    gpus: int = 0
    """That the processes ask for; those that state none share one."""
    gpus_there: int | None = None
    """On all hosts together; None = that is not known, as of a Ray cluster."""

    @property
    def enough_gpus(self) -> bool:
        return self.gpus_there is None or self.gpus <= self.gpus_there

    @property
    def fits(self) -> bool:
        return self.enough_gpus and all(demand.fits for demand in self.demands)

    def of(self, place: str) -> Demand | None:
        return next((demand for demand in self.demands if demand.place == place), None)


@dataclass(frozen=True)
class Remedy:
    """Settings under which a place is large enough."""

    settings: dict[str, Any]
    total: int
    """What the place then needs."""

    def __str__(self) -> str:
        return " and ".join(f"{name}={_written(value)}" for name, value in self.settings.items())


def plan(
    config: ExperimentConfig,
    models: Mapping[str, ModelShape],
    machine: HostMemory,
    *,
    prompt_tokens: int = 1024,
) -> Plan:
    """`models`: the shapes of `actor` and, if the run has one, `ref`. `prompt_tokens`: of a task, before any answer.

    Every other model in `models` is trained beside the actor, on the same ranks, one pass after the other.
    """
    shape = models["actor"]
    trainer, trainer_on_host = _trainer_demand(config, models, machine, prompt_tokens)
    demands, here = [trainer], [(trainer.place, _on_one_host(trainer, machine), trainer_on_host)]
    if isinstance(config, PPOConfig):
        engines = _engine_demand(config, shape, machine, prompt_tokens)
        if engines is not None:
            demands.append(engines)
            on_host = engines.terms if engines.limit is None else {"runtime": HOST_RUNTIME_BYTES}
            here.append((engines.place, _on_one_host(engines, machine), on_host))
        if not config.rollout.in_process:
            here.append(("rollout workers", config.rollout.num_workers, {"runtime": WORKER_BYTES}))
        adapter = _adapter(config.actor)
        size = shape.parameters if adapter is None else adapter.parameters(shape)
        published = {"two versions of the weights": PUBLISHED_VERSIONS * FLOAT_BYTES * size}
        demands.append(Demand("shared memory", published, machine.shm_bytes))
        here.append(("shared memory", 1, published))
        demands = _shared_gpu(config, demands)
    demands.append(Demand("host memory", _summed(here), _usable(machine.host_bytes)))
    return Plan(demands, _gpus_asked(config), _gpus_there(config, machine))


def _gpus_asked(config: ExperimentConfig) -> int:
    ranks = Ranks.parse(config.actor.backend).count if config.actor.backend else 1
    asked = ranks * (config.actor.gpus or 0)
    if isinstance(config, PPOConfig) and not config.rollout.addresses:
        backend = Backend.parse(config.rollout.backend)
        apart = backend.gpus_each if backend.gpus_each > 1 else 0
        asked += backend.servers * (apart if config.rollout.gpus is None else config.rollout.gpus)
    return asked


def _gpus_there(config: ExperimentConfig, machine: HostMemory) -> int | None:
    hosts = {"local": 1, "slurm": config.scheduler.nodes}.get(config.scheduler.type)
    return None if hosts is None else hosts * (machine.gpus_per_node if machine.gpu_bytes else 0)


def _on_one_host(demand: Demand, machine: HostMemory) -> int:
    """How many such processes one host has: all of them, unless each has a GPU."""
    return demand.count if demand.limit is None else min(demand.count, machine.gpus_per_node)


def _trainer_demand(
    config: ExperimentConfig, models: Mapping[str, ModelShape], machine: HostMemory, prompt_tokens: int
) -> tuple[Demand, Terms]:
    """Of each process that trains, and what it needs of its host."""
    actor, training = config.actor, _training(config, prompt_tokens)
    trained, frozen = _trained(models, training), _frozen(config, models)
    device, host = _trainer_terms(trained, frozen, training), Terms()
    on_gpu = machine.gpu_bytes > 0 and actor.device != "cpu" and actor.gpus != 0
    if actor.offload:
        moved = {name: device.pop(name, 0) for name in ("weights", "gradients", "optimizer", *frozen)}
        host |= {f"{name}, offloaded": size for name, size in moved.items() if size}
    if on_gpu or training.ranks is not None:
        own = sum(trained_parameters(each, each_training) for each, each_training in trained)
        host["checkpoint copies"] = (1 + MOMENTS) * FLOAT_BYTES * own
    host["runtime"] = HOST_RUNTIME_BYTES
    ranks = training.data * training.tensor
    if on_gpu:
        terms = {**device, "runtime": GPU_RUNTIME_BYTES}
        return Demand(_who(config), terms, _usable(machine.gpu_bytes), ranks), host
    device["heap"] = max(heap_bytes(*each) for each in trained)
    return Demand(_who(config), {**device, **host}, None, ranks), {**device, **host}


def _who(config: ExperimentConfig) -> str:
    return "actor ranks" if config.actor.backend else "trainer"


def _training(config: ExperimentConfig, prompt_tokens: int) -> Training:
    actor = config.actor
    tokens, trie = actor.max_tokens_per_mb, 0
    if isinstance(config, PPOConfig):
        # A sequence that is longer gets a pass of its own.
        tokens = max(tokens, config.gconfig.max_new_tokens)
        trie = trie_tokens(prompt_tokens, config.gconfig.max_new_tokens, config.gconfig.n_samples)
    ranks = Ranks.parse(actor.backend) if actor.backend else None
    return Training(tokens, ranks, actor.dtype, actor.gradient_checkpointing, actor.offload, trie, _adapter(actor))


def _adapter(actor: ActorConfig) -> AdapterSize | None:
    return None if actor.lora.rank is None else AdapterSize(actor.lora.rank, tuple(actor.lora.targets))


def _trained(models: Mapping[str, ModelShape], training: Training) -> list[tuple[ModelShape, Training]]:
    """Every model that is trained. Only the actor has an adapter."""
    others = replace(training, adapter=None)
    return [(each, training if name == "actor" else others) for name, each in models.items() if name not in FROZEN]


def _frozen(config: ExperimentConfig, models: Mapping[str, ModelShape]) -> dict[str, ModelShape]:
    """What is held beside the models that are trained: not the model of an adapter, which is there already."""

    def is_there(name: str) -> bool:
        return config.actor.lora.rank is not None and getattr(config, name).path == config.actor.path

    return {FROZEN[name]: each for name, each in models.items() if name in FROZEN and not is_there(name)}


def _trainer_terms(
    trained: Sequence[tuple[ModelShape, Training]], frozen: Mapping[str, ModelShape], training: Training
) -> Terms:
    """State adds up over the models; of their passes the largest counts."""
    terms: Terms = {}
    for each in trained:
        for name, size in state_terms(*each).items():
            terms[name] = terms.get(name, 0) + size
    for name, shape in frozen.items():
        terms[name] = frozen_bytes(shape, training)
    passes = [pass_terms(*each) for each in trained]
    return terms | max(passes, key=lambda each: sum(each.values()))


def _engine_demand(config: PPOConfig, shape: ModelShape, machine: HostMemory, prompt_tokens: int) -> Demand | None:
    """Of one engine server on each of its GPUs; without a limit if that is host memory. None = they run
    already."""
    rollout = config.rollout
    if rollout.addresses:
        return None
    backend = Backend.parse(rollout.backend)
    length = min(prompt_tokens + config.gconfig.max_new_tokens, shape.max_positions or prompt_tokens)
    sequences = -(-rollout.max_concurrent_rollouts // backend.servers)
    serving = Serving(sequences, length, rollout.dtype, backend.gpus_each, rollout.kernel, _adapter(config.actor))
    on_gpu = machine.gpu_bytes > 0 and rollout.device != "cpu" and rollout.gpus != 0
    if backend.kind == "embedded":
        memory = machine.gpu_bytes if on_gpu else machine.host_bytes
        episodes = config.train_dataset.batch_size * config.gconfig.n_samples // backend.servers
        terms = embedded_terms(shape, serving, memory, on_cpu=not on_gpu, remembered=episodes)
        terms["runtime"] = GPU_RUNTIME_BYTES if on_gpu else HOST_RUNTIME_BYTES
        return Demand("engines", terms, _usable(memory) if on_gpu else None, backend.servers)
    terms = server_terms(shape, serving)
    count = backend.servers * backend.gpus_each
    if not on_gpu:
        return Demand("engines", {**terms, "KV cache": CPU_CACHE_BYTES, "runtime": HOST_RUNTIME_BYTES}, None, count)
    names, usual = UTILISATION[backend.kind]
    share = float(_argument(rollout.engine_args, names) or usual)
    longest = int(_argument(rollout.engine_args, (LENGTH_ARGUMENTS[backend.kind],)) or shape.max_positions)
    terms["runtime"] = GPU_RUNTIME_BYTES
    limit = int(share * machine.gpu_bytes)
    token = kv_token_bytes(shape, serving)
    room = max(0, limit - sum(terms.values()))
    # It starts only if a sequence of the greatest length fits, and then takes all of its share.
    terms["KV cache"] = max(room, token * longest)
    note = f"KV cache for {room // token:,} tokens: {room // (token * length):,} sequences of {length:,} at once"
    return Demand("engines", terms, limit, count, note)


def _shared_gpu(config: PPOConfig, demands: list[Demand]) -> list[Demand]:
    """Processes that state no `gpus` all compute on the first one; their demands are one."""
    rollout, actor = config.rollout, config.actor
    on_gpus = [each for each in demands if each.place in (_who(config), "engines") and each.limit is not None]
    backend = Backend.parse(rollout.backend)
    engines_apart = bool(rollout.gpus) or backend.gpus_each > 1
    if len(on_gpus) < 2 or (actor.gpus and engines_apart):
        return demands
    trainer, engines = on_gpus
    # Several engines have a GPU each; the first of them shares its own with the trainer.
    together = {f"{_who(config)}: {name}": size for name, size in trainer.terms.items()}
    together |= {f"engine: {name}": size for name, size in engines.terms.items()}
    limit = trainer.limit
    rest = [replace(engines, count=engines.count - 1)] if engines.count > 1 else []
    others = [each for each in demands if each not in on_gpus]
    return [Demand(SHARED_GPU, together, limit, 1, engines.note), *rest, *others]


def _summed(here: Sequence[tuple[str, int, Terms]]) -> Terms:
    """A host's processes, each kind as one term."""
    return {f"{who} × {count}" if count > 1 else who: count * sum(terms.values()) for who, count, terms in here}


def _usable(size: int) -> int:
    return int(USABLE_SHARE * size)


def _argument(words: Sequence[str], names: Sequence[str]) -> str | None:
    for place, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name in names:
            return value if equals else next(iter(words[place + 1 :]), None)
    return None


def remedies(
    config: ExperimentConfig,
    models: Mapping[str, ModelShape],
    machine: HostMemory,
    place: str,
    *,
    prompt_tokens: int = 1024,
) -> list[Remedy]:
    """Settings under which `place` is large enough: single ones, or else pairs, or else three together.

    For a GPU that the trainer and the engine share, if pairs do not help: one for each of them, and what either needs.
    """
    if place != SHARED_GPU:
        return _search(config, models, machine, place, prompt_tokens, MOST_CHANGES)
    found = _search(config, models, machine, place, prompt_tokens, 2)
    return found or _apart(config, models, machine, prompt_tokens)


def _search(
    config: ExperimentConfig,
    models: Mapping[str, ModelShape],
    machine: HostMemory,
    place: str,
    prompt_tokens: int,
    most_changes: int,
) -> list[Remedy]:
    singles = list(_changes(config, models["actor"], machine))
    for count in range(1, most_changes + 1):
        found: dict[tuple[str, ...], Remedy] = {}
        for change in combinations(singles, count):
            settings = {name: value for part in change for name, value in part.items()}
            # The smaller change of the same settings comes first; two values of one setting are no change.
            if tuple(settings) in found or any(part[name] != settings[name] for part in change for name in part):
                continue
            demands = _planned(config, settings, models, machine, place, prompt_tokens)
            if demands and all(demand.fits for demand in demands):
                found[tuple(settings)] = Remedy(settings, max(demand.total for demand in demands))
                if len(found) == MOST_REMEDIES:
                    break
        if found:
            return list(found.values())
    return []


def _apart(
    config: ExperimentConfig, models: Mapping[str, ModelShape], machine: HostMemory, prompt_tokens: int
) -> list[Remedy]:
    """GPUs of their own for the trainer and the engine, and for each the first remedy that it needs then."""
    assert isinstance(config, PPOConfig), "nothing else has engines"
    settings: dict[str, Any] = {"actor.gpus": 1, "rollout.gpus": Backend.parse(config.rollout.backend).gpus_each}
    changed = with_settings(config, settings)
    for demand in plan(changed, models, machine, prompt_tokens=prompt_tokens).demands:
        if demand.place in (_who(config), "engines") and not demand.fits:
            found = _search(changed, models, machine, demand.place, prompt_tokens, MOST_CHANGES)
            if not found:
                return []
            settings |= found[0].settings
    demands = _planned(config, settings, models, machine, SHARED_GPU, prompt_tokens)
    fits = bool(demands) and all(demand.fits for demand in demands)
    return [Remedy(settings, max(demand.total for demand in demands))] if fits else []


def _planned(
    config: ExperimentConfig,
    settings: Mapping[str, Any],
    models: Mapping[str, ModelShape],
    machine: HostMemory,
    place: str,
    prompt_tokens: int,
) -> list[Demand]:
    """The place under these settings, or what has taken its place; nothing if they are refused, or if something else
    would no longer fit."""
    try:
        changed = with_settings(config, settings)
    except ConfigError:
        return []
    planned = plan(changed, models, machine, prompt_tokens=prompt_tokens)
    if _harms(plan(config, models, machine, prompt_tokens=prompt_tokens), planned):
        return []
    same = planned.of(place)
    if same is not None:
        return [same]
    return [each for each in planned.demands if each.place in (_who(changed), SHARED_GPU, "engines")]


def _harms(before: Plan, after: Plan) -> bool:
    """Whether anything that was enough before is no longer."""
    if not after.enough_gpus and after.gpus > before.gpus:
        return True
    fitted = [demand.place for demand in before.demands if demand.fits]
    return any(demand.place in fitted for demand in after.demands if not demand.fits)


def _changes(config: ExperimentConfig, shape: ModelShape, machine: HostMemory) -> Iterator[dict[str, Any]]:
    """Settings that save memory, the smaller change of each first."""
    actor = config.actor
    known = shape.family in FAMILIES or actor.backend
    if not actor.gradient_checkpointing and known:
        yield {"actor.gradient_checkpointing": True}
    tokens = actor.max_tokens_per_mb // 2
    while tokens >= FEWEST_TOKENS:
        yield {"actor.max_tokens_per_mb": tokens}
        tokens //= 2
    if actor.dtype == "float32" and machine.gpu_bytes:
        yield {"actor.dtype": "bfloat16"}
    if machine.gpu_bytes:
        yield from _meshes(actor)
        if actor.backend and not actor.offload:
            yield {"actor.offload": True}
    if isinstance(config, PPOConfig) and not config.rollout.addresses:
        yield from _engine_changes(config, machine)


def _meshes(actor: ActorConfig) -> Iterator[dict[str, Any]]:
    ranks = Ranks.parse(actor.backend) if actor.backend else Ranks(1, 1)
    tensor = f"t{ranks.tensor}" if ranks.tensor > 1 else ""
    data = 2 * ranks.data
    while data * ranks.tensor <= LARGEST_MESH:
        settings: dict[str, Any] = {"actor.backend": f"fsdp:d{data}{tensor}"}
        yield settings if actor.gpus else settings | {"actor.gpus": 1}
        data *= 2


def _engine_changes(config: PPOConfig, machine: HostMemory) -> Iterator[dict[str, Any]]:
    rollout, backend = config.rollout, Backend.parse(config.rollout.backend)
    if rollout.dtype == "float32" and (machine.gpu_bytes or backend.kind != "embedded"):
        yield {"rollout.dtype": "bfloat16"}
    if not (config.actor.gpus and rollout.gpus) and machine.gpu_bytes:
        yield {"actor.gpus": 1, "rollout.gpus": backend.gpus_each}
    at_once = rollout.max_concurrent_rollouts // 2
    while backend.kind == "embedded" and at_once >= 8:
        yield {"rollout.max_concurrent_rollouts": at_once}
        at_once //= 2
    name = LENGTH_ARGUMENTS.get(backend.kind)
    if name is not None and _argument(rollout.engine_args, (name,)) is None:
        for longest in (65536, 32768, 16384, 8192, 4096):
            yield {"rollout.engine_args": [*rollout.engine_args, name, str(longest)]}
    gpus = 2 * backend.gpus_each
    while backend.kind != "embedded" and gpus <= machine.gpus_per_node:
        settings: dict[str, Any] = {"rollout.backend": f"{backend.kind}:d{backend.servers}t{gpus}"}
        yield settings if rollout.gpus is None else settings | {"rollout.gpus": gpus}
        gpus *= 2


def with_settings(config: ExperimentConfig, settings: Mapping[str, Any]) -> ExperimentConfig:
    """The config with settings by their dotted names changed. Raises ConfigError."""
    for dotted, value in settings.items():
        section, _, name = dotted.rpartition(".")
        config = dataclasses.replace(
            config, **{section: dataclasses.replace(getattr(config, section), **{name: value})}
        )
    return config


def verdict(demand: Demand, found: Sequence[Remedy]) -> str:
    """One sentence on a place that is too small."""
    assert demand.limit is not None
    text = f"does not fit: {demand.total / GIB:,.1f} of {demand.limit / GIB:,.1f} GiB on {demand.place}"
    if found:
        several = any(len(each.settings) > 1 for each in found)
        return f"{text}; set {(', or ' if several else ' or ').join(map(str, found))}"
    if demand.place == "shared memory":
        return f"{text}; make it larger (in a container: docker run --shm-size={_rounded(demand.total)}g)"
    return f"{text}; no three settings together would do: take a larger machine or a smaller model"


def gpu_verdict(planned: Plan) -> str:
    """One sentence on GPUs that are too few."""
    return (
        f"does not fit: the run asks for {planned.gpus} GPUs, {planned.gpus_there} are there; use fewer ranks "
        "(actor.backend) or servers (rollout.backend), or describe other machines with --gpu-memory-gb and "
        "--gpus-per-node, on Slurm also scheduler.nodes"
    )


def _rounded(size: int) -> int:
    return -(-size * 11 // 10 // GIB) + 1


def _written(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return "'[" + ", ".join(value) + "]'"
    return str(value)
