"""The id that a question goes by, for those who put it and those who judge the answers."""

import hashlib
import json
from typing import Any

ID_KEYS = ("query_id", "qid", "id")
"""Where a task may say it itself; the first wins."""


def qid_of(task: dict[str, Any]) -> str:
    """The task's own id, or one made of its content, so that whoever reads the same dataset finds the same id."""
    for key in ID_KEYS:
        if key in task:
            return str(task[key])
    text = json.dumps(task, sort_keys=True, ensure_ascii=False, default=str)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
