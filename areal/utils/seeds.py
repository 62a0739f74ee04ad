"""Seeds that follow from other seeds: the same again in the next run, and different wherever they should be."""

from collections import Counter
from hashlib import blake2b
from heapq import heappop, heappush


def derived_seed(*parts: int | str | bytes) -> int:
    """63 bits that follow from all of `parts`."""
    return int.from_bytes(blake2b(repr(parts).encode(), digest_size=8).digest()) >> 1


class CallSeeds:
    """The seeds of one episode's calls.

    A call is known by its prompt, and by how many calls had the same prompt before it: calls that are made at once get
    the same seeds in whatever order they arrive. One that failed does not count: the next in its place gets its seed.
    """

    def __init__(self, episode_seed: int) -> None:
        self._episode_seed = episode_seed
        self._calls: Counter[bytes] = Counter()
        """By prompt."""
        self._unused: dict[bytes, list[int]] = {}
        """Numbers of calls that got no answer, by prompt."""

    def next(self, prompt: bytes, asked: int | None) -> int:
        """The seed of the next call with the prompt whose ids have this digest.

        `asked` is one that the caller chose: it gives the same answer again within the episode, as it should, but not
        in other episodes, since samples of a group that are all equal teach nothing.
        """
        if asked is not None:
            return derived_seed(self._episode_seed, "asked", asked)
        if unused := self._unused.get(prompt):
            return self._seed(prompt, heappop(unused))
        self._calls[prompt] += 1
        return self._seed(prompt, self._calls[prompt])

    def give_back(self, prompt: bytes, seed: int | None) -> None:
        """A call with that prompt and seed got no answer: the next one with the prompt is made in its place."""
        for number in range(1, self._calls[prompt] + 1):
            if self._seed(prompt, number) == seed:
                heappush(self._unused.setdefault(prompt, []), number)

    def _seed(self, prompt: bytes, number: int) -> int:
        return derived_seed(self._episode_seed, prompt, number)
