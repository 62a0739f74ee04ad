"""What many objects have of one field, together: their arrays as one, so that what costs a call costs it once."""

from itertools import accumulate, pairwise
from typing import Any

import numpy as np


def join(values: list[Any]) -> Any:
    """Lists of numbers that are alike become one, after their lengths; everything else stays as it is."""
    first = values[0]
    if not isinstance(first, np.ndarray) or {(each.ndim, each.dtype) for each in values} != {(1, first.dtype)}:
        return values
    return [len(each) for each in values], np.concatenate(values)


def split(column: Any) -> list[Any]:
    """What was joined. The lists are parts of one: whoever changes an item changes it there."""
    if not isinstance(column, tuple):
        return list(column)
    lengths, joined = column
    ends = [0, *accumulate(lengths)]
    if ends[-1] != len(joined):
        raise ValueError(f"lists of {ends[-1]} numbers together cannot be made of {len(joined)}")
    return [joined[begin:end] for begin, end in pairwise(ends)]
