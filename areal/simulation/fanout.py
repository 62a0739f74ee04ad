"""How long a version of the weights takes from the trainer to all engines.

It is written where the trainer is, fetched once by every other host that has engines, checked by each engine, and
swapped in. All hosts fetch at the same time and the same bytes, so one limit holds for all of them, and a fetch takes
as long as the tightest one lets it:

    uplink     hosts · bytes / (hosts that have the weights · their network)
    serving    hosts · bytes · processor time of a byte / processes that serve them
    downlink   bytes / network of a host
    fetching   bytes · processor time of a byte, in the one process of a host that fetches

Generation goes on but for the swap, with the older version.
"""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class FanOut:
    size_bytes: float = 0.0
    """Of a version; 0 = weights take no time."""
    hosts: int = 0
    """Other hosts that have engines."""
    from_ranks: bool = False
    """Every rank serves what it has written; otherwise the driver serves everything."""
    sources: int = 1
    """Processes that serve the weights."""
    source_hosts: int = 1
    """Hosts that these are on."""
    host_bytes_per_second: float = math.inf
    """Of each host's network, in each direction."""
    write_byte_seconds: float = 0.0
    """To copy and hash a byte; the sources share that."""
    gather_seconds: float = 0.0
    """Until the parts of a tensor, which all ranks have some of, are where they are written; of all tensors."""
    serve_byte_seconds: float = 0.0
    fetch_byte_seconds: float = 0.0
    check_byte_seconds: float = 0.0
    """Processor time of a byte, in one process."""
    while_training: bool = False
    """A what-if: the trainer goes on while a version is on its way. Samples may then be one version older."""

    @property
    def write_seconds(self) -> float:
        return self.gather_seconds + self.size_bytes * self.write_byte_seconds / self.sources

    @property
    def check_seconds(self) -> float:
        return self.size_bytes * self.check_byte_seconds

    @property
    def served_bytes(self) -> float:
        """That leave the sources for all hosts, for one version."""
        return self.hosts * self.size_bytes

    def limits(self, hosts: int | None = None) -> dict[str, float]:
        """Seconds of a fetch by so many hosts (all of them) at once, as far as each limit goes."""
        hosts = self.hosts if hosts is None else hosts
        size = self.size_bytes if hosts else 0.0
        return {
            "uplink": hosts * size / (self.source_hosts * self.host_bytes_per_second),
            "serving": hosts * size * self.serve_byte_seconds / self.sources,
            "downlink": size / self.host_bytes_per_second,
            "fetching": size * self.fetch_byte_seconds,
        }

    def stage_seconds(self, hosts: int | None = None) -> float:
        """Fetched and checked, with nothing else to do."""
        return max(self.limits(hosts).values()) + self.check_seconds
