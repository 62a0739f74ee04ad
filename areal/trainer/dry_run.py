"""What `areal train` would do: everything is resolved and checked, cheap things first, and nothing is started.

`areal train --dry-run` shows it. What would be refused at the start of the run is refused here, with the same words; so
are memory and places that this machine does not have.
"""

import json
import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal.api.errors import ConfigError
from areal.config.experiment import PPOConfig
from areal.config.reference import as_yaml
from areal.dataset import get_custom_dataset
from areal.engine.host_memory import model_shapes, this_machine
from areal.engine.model.shape import ModelShape
from areal.engine.sizing import GIB, HostMemory, Plan, gpu_verdict, plan, remedies, verdict
from areal.infra.scheduler import Ask
from areal.infra.scheduler.local import FreeResources
from areal.rollout.loading import REWARD_MODEL, WorkflowSpec, check, import_object, is_agent, unused_reward
from areal.trainer.run_directory import find_checkpoints, refuse_existing
from areal.trainer.tasks import Settled, task_stream
from areal.trainer.trainers import check_engines, check_models, check_ranks
from areal.utils.shorten import printable, shortened
from areal.utils.threads import ThreadPlan, plan_threads

SHOWN_TASK = 300
"""Characters of the first task that are shown."""


@dataclass(frozen=True)
class RunPlan:
    config: PPOConfig
    directory: Path | None
    """None = a new one, whose name is made from the time."""
    resumed_from: int | None
    """The step of the newest checkpoint, if there is one."""
    agent: bool
    tasks: int
    valid: int
    first_task: dict[str, Any]
    models: dict[str, ModelShape]
    asks: list[Ask]
    threads: ThreadPlan
    memory: Plan | None
    """None = the run is not on this machine, so what there is is not known."""

    @property
    def steps(self) -> int:
        return self.config.total_steps(self.tasks)

    def facts(self) -> dict[str, str]:
        """What people are shown, by its name."""
        config = self.config
        samples, batch = config.gconfig.n_samples, config.train_dataset.batch_size
        return {
            "run": self._run(),
            **{_role(name): _model(path, self.models[name]) for name, path in self._model_paths().items()},
            "workflow": self._workflow(),
            "tasks": f"{self.tasks:,} of {config.train_dataset.path}",
            "held out": f"{self.valid:,} of {config.valid_dataset.path}" if self.valid else "none",
            "first task": shortened(_as_text(self.first_task), SHOWN_TASK),
            "steps": f"{self.steps:,} of {batch} tasks × {samples} episodes, each at most "
            f"{config.rollout.max_head_offpolicyness} versions old",
            "algorithm": self._algorithm(),
            "evaluation": self._evaluation(),
            "checkpoints": f"{_every(config.saver.freq_steps)}after the last step; {config.saver.keep} are kept",
            "processes": self._processes(),
            "threads": self.threads.reason,
            "memory": self._memory(),
        }

    def as_json(self) -> dict[str, Any]:
        memory = self.memory and {
            each.place: {"bytes": each.total, "limit": each.limit, "count": each.count} for each in self.memory.demands
        }
        return {
            "run": None if self.directory is None else str(self.directory),
            "resumed_from": self.resumed_from,
            "models": {
                name: {"path": path, "parameters": self.models[name].parameters}
                for name, path in self._model_paths().items()
            },
            "workflow": self.config.workflow,
            "agent": self.agent,
            "tasks": self.tasks,
            "valid_tasks": self.valid,
            "first_task": json.loads(json.dumps(self.first_task, default=str)),
            "steps": self.steps,
            "algorithm": self.config.resolved.algorithm.name,
            "processes": [each.name for each in self.asks],
            "threads": {"engine": self.threads.engine, "trainer": self.threads.trainer},
            "memory": memory,
        }

    def _model_paths(self) -> dict[str, str]:
        paths = {"actor": self.config.actor.path, "ref": self.config.ref.path, "critic": self.config.critic.path}
        paths["teacher"] = self.config.teacher.path
        return {name: paths[name] for name in self.models}

    def _run(self) -> str:
        config = self.config
        if self.directory is None:
            return f"a new one in {Path(config.output_dir) / config.experiment_name}"
        if self.resumed_from is not None:
            return f"{self.directory}, which goes on from step {self.resumed_from} or later"
        begun = (self.directory / "config.yaml").exists()
        return f"{self.directory}, {'which begins again: it has no checkpoint' if begun else 'new'}"

    def _workflow(self) -> str:
        config, agent = self.config, self.config.rollout.agent
        kind = f"an agent, {agent.mode}" if self.agent else "a RolloutWorkflow"
        unused = unused_reward(WorkflowSpec(config.workflow), config.reward_fn)
        reward = f", with {config.reward_fn}" if config.reward_fn and not unused else ""
        said = f"{config.workflow} ({kind}{reward}); {agent.timeout_seconds:g} s an episode at most"
        return f"{said}; {unused}" if unused else said

    def _algorithm(self) -> str:
        resolved = self.config.resolved
        chosen = [f"{each.name}={as_yaml(each.value)}" for each in resolved.table if each.origin != "default"]
        return f"{resolved.algorithm.name}" + (f": {', '.join(chosen)}" if chosen else "")

    def _evaluation(self) -> str:
        if not self.valid:
            return "none, because there are no held-out tasks"
        evaluator = self.config.evaluator
        each = "once" if evaluator.n_samples == 1 else f"{evaluator.n_samples} times"
        greedy = ", and greedily at both ends" if evaluator.greedy else ""
        return f"before the first step, {_every(evaluator.freq_steps)}after the last; sampled {each}{greedy}"

    def _processes(self) -> str:
        config = self.config
        kinds = Counter(each.name.rstrip(" 0123456789") for each in self.asks)
        listed = ", ".join(f"{count} × {kind}" if count > 1 else kind for kind, count in kinds.items())
        where = "on this machine" if config.scheduler.type == "local" else f"placed by {config.scheduler.type}"
        return f"{listed}; {where} (engine: {config.rollout.backend})"

    def _memory(self) -> str:
        if self.memory is None:
            return "not known of other machines; areal doctor --config FILE --gpu-memory-gb N plans for them"
        parts = []
        for each in self.memory.demands:
            count = f"{each.count} × " if each.count > 1 else ""
            of = "" if each.limit is None else f" of {each.limit / GIB:,.1f}"
            parts.append(f"{each.place} {count}{each.total / GIB:,.2f}{of} GiB")
        return ", ".join(parts) + ": it fits"


def plan_run(config: PPOConfig) -> RunPlan:
    """Raises ArealError if the run could not be started, or its memory would not fit on this machine."""
    directory, resumed = _directory(config)
    check_ranks(config)
    check_engines(config)
    check_models(config)
    spec = WorkflowSpec(config.workflow)
    check(spec, config.reward_fn)
    if config.reward_fn and not config.reward_fn.startswith(REWARD_MODEL):
        import_object(config.reward_fn, "reward_fn")  # also where the workflow takes none
    tasks = get_custom_dataset("train", config.train_dataset)
    valid = get_custom_dataset("test", config.valid_dataset) if config.valid_dataset.path else []
    _, first = next(task_stream(tasks, config.seed, Settled(), shuffle=config.train_dataset.shuffle))
    models = model_shapes(config)
    asks, memory = _placed(config, models)
    threads = plan_threads(config.rollout.max_head_offpolicyness, config.scheduler.threads)
    return RunPlan(
        config, directory, resumed, is_agent(spec), len(tasks), len(valid), first, models, asks, threads, memory
    )


def _directory(config: PPOConfig) -> tuple[Path | None, int | None]:
    if config.trial_name is None:
        return None, None
    directory = Path(config.output_dir) / config.experiment_name / config.trial_name
    refuse_existing(directory, config)
    return directory, max(find_checkpoints(directory), default=None)


def _placed(config: PPOConfig, models: dict[str, ModelShape]) -> tuple[list[Ask], Plan | None]:
    """What processes ask for, and their memory: on this machine, all of it must be there."""
    from areal.engine.model.device import find_device  # torch, so it comes last
    from areal.trainer.engines import on_this_machine
    from areal.trainer.fleet import all_asks

    if config.scheduler.type != "local":
        return all_asks(config), None
    find_device(config.actor.device, "actor.device")
    on_this_machine(config.rollout)
    asks, free = all_asks(config), FreeResources.this(os.environ)
    for each in asks:
        free.take(each)
    machine = this_machine()
    planned = plan(config, models, machine)
    _require_fit(config, models, machine, planned)
    return asks, planned


def _require_fit(config: PPOConfig, models: dict[str, ModelShape], machine: HostMemory, planned: Plan) -> None:
    too_small = [each for each in planned.demands if not each.fits]
    said = [verdict(each, remedies(config, models, machine, each.place)) for each in too_small]
    if not planned.enough_gpus:
        said.append(gpu_verdict(planned))
    if said:
        raise ConfigError(f"{'. '.join(said)} (areal doctor has the details)")


def _role(name: str) -> str:
    return {"actor": "model", "ref": "reference"}.get(name, name)


def _model(path: str, shape: ModelShape) -> str:
    size = f"{shape.parameters / 1e9:,.2f}B" if shape.parameters >= 1e9 else f"{shape.parameters / 1e6:,.2f}M"
    return f"{path}: {shape.family or 'model'} of {size} parameters, {shape.max_positions:,} positions"


def _every(steps: int | None) -> str:
    return "" if steps is None else f"every {steps} steps, "


def _as_text(task: dict[str, Any]) -> str:
    """On one line; nothing in it can move a terminal's cursor."""
    text = json.dumps(task, ensure_ascii=False, default=str)
    return printable(text)
