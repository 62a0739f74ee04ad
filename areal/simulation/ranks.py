"""How long ranks take for a step: the slowest share is computed, and the ranks talk to each other.

    step = most tokens of a share / (t · tokens per second · efficiency) + what is not hidden of the communication
    communication = passes · bytes that FSDP gathers and reduces · (d - 1) / d / bandwidth
                  + tokens of a share · bytes that tensor parallelism reduces · 2 (t - 1) / t / bandwidth

A rank with fewer passes adds empty ones, since each is a collective of all: so the number of passes is that of the
largest share.
"""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

from areal.config.parallel import Ranks


@dataclass(frozen=True)
class StepTime:
    computing: float
    communicating: float
    """What is not hidden behind computing. Both in seconds."""
    passes: int
    network_bytes: float
    """That FSDP moves into each host, if there are several."""


@dataclass(frozen=True)
class RankSpeed:
    ranks: Ranks
    tokens_per_second: float
    """Of one rank by itself."""
    efficiency: float = 1.0
    """Share of that speed that is left when ranks work together, communication aside."""
    pass_tokens: float = math.inf
    """`actor.max_tokens_per_mb`."""
    pass_bytes: float = 0.0
    """What FSDP gathers and reduces in a pass: all parameters, each time that they are needed, and all gradients."""
    pass_bytes_per_second: float = math.inf
    """Into a host, or into a rank's part of the model if all are on one."""
    tensor_bytes_per_token: float = 0.0
    """What tensor parallelism reduces: a hidden state for each collective of each layer."""
    tensor_bytes_per_second: float = math.inf
    """Of one GPU to its neighbours."""
    overlap: float = 0.0
    """Share of the communication that goes on while the ranks compute, as far as that lasts."""

    def step(self, sequences: Sequence[float]) -> StepTime:
        """`sequences`: the tokens of each."""
        most = max(deal(sequences, self.ranks.data))
        passes = max(1, math.ceil(most / self.pass_tokens))
        computing = most / (self.ranks.tensor * self.tokens_per_second * self.efficiency)
        network_bytes = passes * self.pass_bytes * (self.ranks.data - 1) / self.ranks.data
        tensor_bytes = most * self.tensor_bytes_per_token * 2 * (self.ranks.tensor - 1) / self.ranks.tensor
        communicating = network_bytes / self.pass_bytes_per_second + tensor_bytes / self.tensor_bytes_per_second
        hidden = min(self.overlap * communicating, computing)
        return StepTime(computing, communicating - hidden, passes, network_bytes)


def deal(sequences: Sequence[float], shares: int) -> list[float]:
    """Tokens of each share, dealt like the driver does it: the longest first, each to the share that has the least."""
    loads = [0.0] * shares
    for tokens in sorted(sequences, reverse=True):
        heapq.heapreplace(loads, loads[0] + tokens)
    return loads
