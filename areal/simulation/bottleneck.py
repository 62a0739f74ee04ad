"""Which part of a predicted run saturates first, and what to set.

The training loop is one chain: wait for episodes, deal, compute, communicate, publish, save. While it hardly waits for
episodes, its longest link is the bottleneck. Otherwise the other side is: engines, workers or the driver without time
to spare, or too few episodes at once to keep them busy.
"""

import math
from dataclasses import dataclass

from areal.simulation.scenario import Prediction, Scenario

FULL = 0.85
"""A part that is used so much has no time to spare: what it serves comes unevenly."""
WAITING = 0.1
"""Share of its time that a training loop may wait for episodes and still be the slower side."""
MORE_PER_VERSION = "train more tokens per version (train_dataset.batch_size)"


@dataclass(frozen=True)
class Bottleneck:
    part: str
    remedy: str


def find_bottleneck(scenario: Scenario, run: Prediction, engine_room: float = math.inf) -> Bottleneck:
    """`engine_room`: requests that an engine can have at once."""
    waiting = {name: run.loop.get(name, 0.0) for name in ("waiting for episodes", "waiting for the oldest")}
    if sum(waiting.values()) > WAITING:
        return _of_rollout(scenario, run, engine_room)
    links = {name: share for name, share in run.loop.items() if name not in (*waiting, "restarting")}
    return _of_loop(max(links, key=links.__getitem__), scenario, run)


def _of_loop(link: str, scenario: Scenario, run: Prediction) -> Bottleneck:
    share = f"{run.loop[link]:.0%} of a step"
    match link:
        case "publishing":
            fan_out = scenario.fan_out
            limits = {**fan_out.limits(), "checking": fan_out.check_seconds, "writing": fan_out.write_seconds}
            tightest = max(limits, key=limits.__getitem__)
            what = {
                "uplink": "the network of the hosts that have the weights; publish from ranks on more hosts",
                "serving": "the processes that serve the weights; publish from the ranks, not from the driver",
                "downlink": "the network of an engine's host; publish fewer bytes",
                "fetching": f"the process that fetches them on a host; {MORE_PER_VERSION}",
                "checking": f"the check of their digests; {MORE_PER_VERSION}",
                "writing": f"the ranks that write them; {MORE_PER_VERSION}",
            }
            return Bottleneck("publishing", f"{share}, limited by {what[tightest]}")
        case "dealing":
            return Bottleneck("driver", f"dealing a batch is {share}; a batch of fewer, longer episodes costs it less")
        case "communicating":
            return Bottleneck(
                "communication of the ranks", f"{share}; raise actor.max_tokens_per_mb, so that a step has fewer passes"
            )
        case "saving":
            return Bottleneck("checkpoints", f"{share}; raise saver.freq_steps")
    engines, ranks = scenario.engines * scenario.gpus_per_engine, scenario.trainer_gpus
    return Bottleneck("trainer", f"computing is {share}; more ranks ({ranks} of {engines + ranks} GPUs now)")


def _of_rollout(scenario: Scenario, run: Prediction, engine_room: float) -> Bottleneck:
    used = run.utilisation
    if used["driver"] > FULL:
        return Bottleneck("driver", f"{used['driver']:.0%} of its one core; longer episodes cost it less than many")
    if used["rollout workers"] > FULL:
        enough = math.ceil(scenario.workers * used["rollout workers"] / (0.7 * FULL))
        return Bottleneck("rollout workers", f"{used['rollout workers']:.0%} busy; rollout.num_workers={enough}")
    if used["engines"] > FULL or run.engine_requests > FULL * engine_room:
        gpus = scenario.engines * scenario.gpus_per_engine
        return Bottleneck("engines", f"{run.engine_requests:.0f} requests each; more of them ({gpus} GPUs now)")
    if used["episodes at once"] > FULL:
        more = math.ceil(scenario.max_concurrent_rollouts * 1.5)
        return Bottleneck("episodes at once", f"engines have time to spare; rollout.max_concurrent_rollouts={more}")
    eta = scenario.max_head_offpolicyness
    oldest = run.loop.get("waiting for the oldest", 0.0)
    if oldest > run.loop.get("waiting for episodes", 0.0):
        return Bottleneck(
            "staleness",
            f"{oldest:.0%} of a step waits for the longest episodes, lest they become older than η = {eta}; "
            f"rollout.max_head_offpolicyness={eta + 2}, or rollout.when_stale=train with the decoupled loss",
        )
    return Bottleneck(
        "staleness",
        f"η = {eta} admits no more episodes; rollout.max_head_offpolicyness={eta + 2}, a larger batch, "
        "or fewer engines",
    )
