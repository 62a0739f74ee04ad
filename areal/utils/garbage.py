"""Python's cyclic garbage collector in a process that serves for hours.

It looks at everything that is alive again and again, which took a fifth of an engine's processor time: hundreds of
thousands of objects belong to loaded libraries and never die. They are set aside, and what is new is looked at less
often. Nearly all of it is freed without the collector; what waits for it is at most that many small objects.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

NEW_OBJECTS = 100_000
"""So many more made than freed bring a collection; Python's own number is 700. It is more than hundreds of episodes in
flight are made of, 200 objects each: less would look at all of them again and again, and find nothing. More would hold
up a worker for longer: a collection takes some tens of milliseconds, most of them to free what it finds."""
YOUNG_COLLECTIONS = 3
"""So many of those bring one of what they have left, which takes as much longer; Python's own number is 10."""


def settle() -> None:
    """For a process that has loaded what it needs and has this one purpose."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(NEW_OBJECTS, YOUNG_COLLECTIONS, gc.get_threshold()[2])


@contextmanager
def settled() -> Iterator[None]:
    """The same for a block in a process that belongs to others."""
    before = gc.get_threshold()
    settle()
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
