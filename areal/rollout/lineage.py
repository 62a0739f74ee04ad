"""Which weights each version stands for: what the trainer published against what the engine says it used.

An engine may use a version a moment before its publication is known here. What it says of such a version is kept, and
compared when the publication comes.
"""

from dataclasses import dataclass, field

from areal.api.errors import WeightMismatch


@dataclass
class Lineage:
    published: dict[int, str] = field(default_factory=dict)
    """version -> digest"""
    claimed: dict[int, str] = field(default_factory=dict)
    """What an engine said of versions that are not yet published."""

    def publish(self, version: int, digest: str) -> None:
        """Raises WeightMismatch if an engine already used something else under that number, or one before it."""
        self.published[version] = digest
        due = {number: said for number, said in self.claimed.items() if number <= version}
        self.claimed = {number: said for number, said in self.claimed.items() if number > version}
        self.check(due)

    def check(self, digests: dict[int, str]) -> None:
        """`digests` is what an engine says of the versions behind its tokens."""
        newest = max(self.published, default=-1)
        for version, said in digests.items():
            known = self.published.get(version)
            if known is None and version > newest:
                known = self.claimed.setdefault(version, said)
            if known != said:
                raise WeightMismatch(
                    f"the engine says that version {version} has the weights {said}, published were "
                    f"{known or 'none of that version'}; a stale engine or a second trainer is using this run"
                )
