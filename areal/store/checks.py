"""Checksums of what was sampled, field by field, and of the batch that a step trained.

They tell a store whose bytes have changed from a machine that computes otherwise, and name what has changed. They
detect accidents and edits, not someone who writes new checksums too.
"""

import zlib
from collections.abc import Iterable, Sequence
from hashlib import blake2b

import numpy as np

from areal.api.messages import Row
from areal.store.blobs import packed

FIELDS = (
    "input_ids",
    "loss_mask",
    "logprobs",
    "versions",
    "returns",
    "completion_index",
    "temperatures",
    "reward",
    "recompute_logprobs",
    "truncated",
    "images",
    "group_id",
    "truncated_completions",
)
"""Of a row, in the order of their checksums. A new one goes to the end: older stores have no checksum of it."""
CHECK_BYTES = 4


def checks_of(rows: Sequence[Row]) -> bytes:
    """A checksum for each field, over all rows of an episode."""
    return b"".join(_check(rows, name) for name in FIELDS)


def altered_fields(rows: Sequence[Row], checks: bytes) -> list[str]:
    """Those whose values are not the ones that `checks` was made of."""
    return differing_fields(checks_of(rows), checks)


def differing_fields(one: bytes, other: bytes) -> list[str]:
    """Those whose checksums are not the same, of the fields that both have."""
    pairs = zip(FIELDS, _split(one), _split(other), strict=False)
    return [name for name, check, another in pairs if check != another]


def _split(checks: bytes) -> list[bytes]:
    return [checks[at : at + CHECK_BYTES] for at in range(0, len(checks), CHECK_BYTES)]


def batch_digest(groups: Iterable[tuple[int, Sequence[bytes]]]) -> str:
    """Of a step's groups in their order: each as its task id and the checksums of its episodes."""
    digest = blake2b(digest_size=16)
    for task_id, episodes in groups:
        digest.update(repr((task_id, list(episodes))).encode())
    return digest.hexdigest()


def _check(rows: Sequence[Row], name: str) -> bytes:
    check = 0
    for row in rows:
        value = getattr(row, name)
        if isinstance(value, np.ndarray):  # without a copy
            check = zlib.crc32(f"{value.dtype.str} {value.shape}".encode(), check)
            check = zlib.crc32(np.ascontiguousarray(value).data, check)
        else:
            check = zlib.crc32(packed(value), check)
    return check.to_bytes(CHECK_BYTES, "big")
