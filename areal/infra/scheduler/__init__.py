"""Where processes run. A scheduler starts commands; the processes then connect to the driver."""

from collections.abc import Callable

from areal.config.training import SchedulerConfig
from areal.infra.scheduler.base import Ask, Command, Launcher, Placement
from areal.infra.scheduler.local import LocalLauncher, LocalScheduler
from areal.infra.scheduler.ray import RayLauncher
from areal.infra.scheduler.scheduler import Scheduler
from areal.infra.scheduler.slurm import SlurmLauncher

__all__ = ["LAUNCHERS", "Ask", "Command", "LocalScheduler", "Placement", "Scheduler", "make_scheduler"]

LAUNCHERS: dict[str, Callable[[SchedulerConfig], Launcher]] = {
    "local": lambda config: LocalLauncher(),
    "slurm": lambda config: SlurmLauncher(config.nodes, config.slurm_arguments),
    "ray": lambda config: RayLauncher(config.ray_address),
}
"""By `scheduler.type`."""


def make_scheduler(config: SchedulerConfig) -> Scheduler:
    return Scheduler(LAUNCHERS[config.type](config), config.address)
