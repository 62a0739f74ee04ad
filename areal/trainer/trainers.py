"""`PPOTrainer`, which a script constructs to train an agent, and what every trainer says and checks first.

It says at once what it is about to do, and checks what a user may have got wrong: settings, paths, tasks and the
workflow. That takes a fraction of a second. Only then torch loads, with what does the work (`ppo.py`).
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from shutil import get_terminal_size
from textwrap import fill
from typing import TYPE_CHECKING, Any

from areal import __version__
from areal.config.backend import SERVER_REMEDY, SERVERS, Backend
from areal.config.errors import require
from areal.config.experiment import ExperimentConfig, PPOConfig
from areal.config.parallel import Ranks
from areal.dataset import TaskSource, get_custom_dataset, read_tasks
from areal.engine.model_path import check_model_path
from areal.rollout.loading import Workflow, WorkflowSpec, check, unused_reward
from areal.utils.closing import Closing
from areal.utils.installing import install_hint
from areal.utils.logging import getLogger
from areal.utils.shorten import plural

if TYPE_CHECKING:  # they load torch
    from areal.trainer.ppo import GroupFilter, PPOTraining
    from areal.trainer.run import TrainResult

RANKS_PER_CORE = 4
"""On one machine: more would wait for each other rather than compute."""


class PPOTrainer(Closing):
    """Trains an agent's model by reinforcement."""

    def __init__(
        self, config: PPOConfig, train_dataset: TaskSource | None = None, valid_dataset: TaskSource | None = None
    ) -> None:
        """Datasets given here win over those that the config names."""
        say_what_begins(config, f"× {config.gconfig.n_samples} episodes")
        self.config = config
        self._training: PPOTraining | None = None
        """What does the work, from the first call of `train` on."""
        check_ranks(config)
        check_engines(config)
        check_models(config)
        check_trackers(config)
        if config.rollout.tracing:
            from areal.infra.tracing import require_installed  # here, because it loads numpy

            require_installed()
        self._tasks_named = train_dataset is None
        if train_dataset is not None:
            self._tasks = read_tasks(train_dataset)
        else:
            self._tasks = get_custom_dataset("train", dataset_config=config.train_dataset)
        if valid_dataset is not None:
            self._valid = read_tasks(valid_dataset, "test")
        else:
            named = config.valid_dataset.path
            self._valid = get_custom_dataset("test", dataset_config=config.valid_dataset) if named else []

    def close(self) -> None:
        """Let another process have the run's directory."""
        if self._training is not None:
            self._training.close()
            self._training = None

    def train(
        self,
        workflow: Workflow,
        eval_workflow: Workflow | None = None,
        workflow_kwargs: dict[str, Any] | None = None,
        eval_workflow_kwargs: dict[str, Any] | None = None,
        dynamic_filter_fn: "GroupFilter | None" = None,
    ) -> "TrainResult":
        """Train to the last step, or to Ctrl-C; everything is saved either way."""
        train_spec = WorkflowSpec(workflow, workflow_kwargs or {})
        eval_spec = WorkflowSpec(eval_workflow, eval_workflow_kwargs or {}) if eval_workflow is not None else train_spec
        for spec in (train_spec, eval_spec):
            check(spec, self.config.reward_fn)
        if unused := unused_reward(train_spec, self.config.reward_fn):
            getLogger("trainer").warning(unused)
        with _loading(self.config):
            import numpy  # noqa: F401  (before torch, which drops a Ctrl-C that comes while it imports numpy)

            from areal.trainer.ppo import PPOTraining
        if self._training is None:
            self._training = PPOTraining(self.config, self._tasks, self._valid, tasks_named=self._tasks_named)
        return self._training.train(train_spec, eval_spec, dynamic_filter_fn)


def say_what_begins(config: ExperimentConfig, of_what: str) -> None:
    """The first line: printed plainly, because what prints nicely takes longer to load than everything before it."""
    if config.quiet:
        return
    steps = plural(config.total_train_steps, "step") if config.total_train_steps else "steps"
    named = f"areal {__version__} · {config.experiment_name} · {config.actor.path}"
    line = f"{named} · {steps} of {config.train_dataset.batch_size} {of_what}"
    with suppress(BrokenPipeError):  # nobody has to read it
        print(_wrapped(line) if sys.stderr.isatty() else line, file=sys.stderr, flush=True)


def _wrapped(line: str) -> str:
    columns = get_terminal_size().columns
    return fill(line, columns, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


@contextmanager
def _loading(config: ExperimentConfig) -> Iterator[None]:
    """Show that torch is being loaded, which can take half a minute on a busy machine."""
    if config.quiet or "areal.trainer.ppo" in sys.modules:
        yield
        return
    from areal.trainer.display import waiting  # it takes a tenth of a second

    with waiting("loading torch"):
        yield


def check_models(config: PPOConfig) -> None:
    """Whether what the config names can be models."""
    for path in (config.actor.path, config.tokenizer_path, config.ref.path, config.critic.path, config.teacher.path):
        if path:
            check_model_path(path)


def check_trackers(config: ExperimentConfig) -> None:
    """Whether the libraries of those that the config names are here."""
    for name in config.trackers:
        require(find_spec(name) is not None, f"tracker={name} needs its library; pip install {name}")


def check_engines(config: PPOConfig) -> None:
    """Whether those that the config names can be started here; one in an environment of its own tells so itself."""
    rollout, kind = config.rollout, Backend.parse(config.rollout.backend).kind
    if kind == "embedded" or rollout.addresses or rollout.python or config.scheduler.type != "local":
        return
    require(
        find_spec(kind) is not None,
        f"rollout.backend={rollout.backend} needs {SERVERS[kind]}, which is not in {sys.executable}; {SERVER_REMEDY}",
    )


def check_ranks(config: ExperimentConfig) -> None:
    """Whether those that the config names can be started here."""
    backend = config.actor.backend
    if not backend:
        return
    require(
        find_spec("accelerate") is not None,
        f"actor.backend={backend} needs transformers with accelerate; {install_hint('fsdp')}",
    )
    ranks, cores = Ranks.parse(backend).count, os.cpu_count() or 1
    require(
        config.scheduler.type != "local" or ranks <= RANKS_PER_CORE * cores,
        f"actor.backend={backend} starts {ranks} ranks on this machine, which has {cores} cores; "
        "use fewer, or scheduler.type=slurm or ray",
    )
