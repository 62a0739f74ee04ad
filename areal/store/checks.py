"""Checksums of what was sampled, field by field, and of the batch that a step trained.

They tell a store whose bytes have changed from a machine that computes otherwise, and name what has changed. They
detect accidents and edits, not someone who writes new checksums too.
"""

import zlib
from collections.abc import Iterable, Mapping
from hashlib import blake2b

from areal.store.blobs import SAMPLE

FIELDS = (
    SAMPLE,
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
    "choices",
)
"""Of rows, in the order of their checksums. A new one goes to the end: older stores have no checksum of it."""
CHECK_BYTES = 4


def checks_of(columns: Mapping[str, bytes]) -> bytes:
    """A checksum of each field of a group's rows."""
    return b"".join(zlib.crc32(columns.get(name, b"")).to_bytes(CHECK_BYTES, "big") for name in FIELDS)


def differing_fields(one: bytes, other: bytes) -> list[str]:
    """Those whose checksums are not the same, of the fields that both have."""
    pairs = zip(FIELDS, _split(one), _split(other), strict=False)
    return [name for name, check, another in pairs if check != another]


def batch_digest(groups: Iterable[tuple[int, bytes]]) -> str:
    """Of a step's groups in their order, each as its task id and its checksums."""
    digest = blake2b(digest_size=16)
    for task_id, checks in groups:
        digest.update(repr((task_id, checks)).encode())
    return digest.hexdigest()


def _split(checks: bytes) -> list[bytes]:
    return [checks[at : at + CHECK_BYTES] for at in range(0, len(checks), CHECK_BYTES)]
