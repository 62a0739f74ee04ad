"""Seeds that follow from other seeds: the same again in the next run, and different wherever they should be."""

from array import array
from collections import Counter
from collections.abc import Sequence
from hashlib import blake2b


def derived_seed(*parts: int | str | bytes) -> int:
    """63 bits that follow from all of `parts`."""
    return int.from_bytes(blake2b(repr(parts).encode(), digest_size=8).digest()) >> 1


class CallSeeds:
    """The seeds of one episode's calls.

    A call is known by its prompt, and by how many calls had the same prompt before it: calls that are made at once get
    the same seeds in whatever order they arrive.
    """

    def __init__(self, episode_seed: int) -> None:
        self._episode_seed = episode_seed
        self._calls: Counter[bytes] = Counter()
        """By prompt."""

    def next(self, prompt: Sequence[int], asked: int | None) -> int:
        """The seed of the next call with that prompt.

        `asked` is one that the caller chose: it gives the same answer again within the episode, as it should, but not
        in other episodes, since samples of a group that are all equal teach nothing.
        """
        if asked is not None:
            return derived_seed(self._episode_seed, "asked", asked)
        name = blake2b(array("q", prompt).tobytes(), digest_size=16).digest()
        self._calls[name] += 1
        return derived_seed(self._episode_seed, name, self._calls[name])
