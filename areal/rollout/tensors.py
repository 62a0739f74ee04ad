"""What a RolloutWorkflow returns, checked and turned into rows.

Two shapes are known: the full tensor dict, batch first, and the short form of one completion (1-D prompt `input_ids`,
`output_ids`, scalar `reward`), whose log-probs the trainer recomputes. Everything wrong is named at once.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from areal.api.errors import AgentFailed
from areal.api.messages import Array, Row

REQUIRED = ("input_ids", "loss_mask", "logprobs", "versions", "rewards")
OPTIONAL = ("attention_mask", "returns", "completion_index", "temperatures", "group_id")


def rows_of(tensors: Any, name: str) -> list[Row]:
    """Rows of a workflow's result; `AgentFailed` names every missing or wrong field."""
    if not isinstance(tensors, Mapping):
        raise AgentFailed(f"{name} must return a dict of tensors or None, got {type(tensors).__name__}")
    arrays = {key: _array(value) for key, value in tensors.items()}
    if "output_ids" in arrays:
        return [_short_row(arrays, name)]
    faults = _faults(arrays)
    if faults:
        raise AgentFailed(f"{name} returned a wrong trajectory: " + "; ".join(faults))
    return [_row(arrays, index) for index in range(len(arrays["rewards"]))]


def _array(value: Any) -> Array:
    detached = value.detach().cpu() if hasattr(value, "detach") else value
    return np.asarray(detached)


def _faults(arrays: dict[str, Array]) -> list[str]:
    faults = [f"{key} is missing" for key in REQUIRED if key not in arrays]
    faults += [f"{key} is unknown" for key in arrays if key not in (*REQUIRED, *OPTIONAL)]
    if "input_ids" not in arrays:
        return faults
    shape = arrays["input_ids"].shape
    if len(shape) != 2 or 0 in shape:
        return [*faults, f"input_ids must have shape [batch, length], got {list(shape)}"]
    for key, array in arrays.items():
        wanted = shape[:1] if key in ("rewards", "group_id") else shape
        if array.shape != wanted:
            faults.append(f"{key} must have shape {list(wanted)}, got {list(array.shape)}")
        elif array.dtype.kind == "f" and not np.isfinite(array).all():
            faults.append(f"{key} must be finite")
    return faults + _meaning_faults(arrays)


def _meaning_faults(arrays: dict[str, Array]) -> list[str]:
    faults = []
    if arrays["input_ids"].dtype.kind not in "iu":
        faults.append(f"input_ids must be integers, got {arrays['input_ids'].dtype}")
    mask = arrays.get("loss_mask")
    if mask is not None and mask.ndim == 2:
        if mask[:, 0].any():
            faults.append("loss_mask must be 0 on the first token, which nothing predicts")
        if not mask.any():
            faults.append("loss_mask must have a token to train on")
    return faults


def _row(arrays: dict[str, Array], index: int) -> Row:
    attention = arrays.get("attention_mask")
    length = arrays["input_ids"].shape[1] if attention is None else int(attention[index].sum())

    def take(key: str, dtype: type[np.generic]) -> Array:
        return np.ascontiguousarray(arrays[key][index, :length], dtype=dtype)

    mask = take("loss_mask", np.bool_)
    reward = float(arrays["rewards"][index])
    return Row(
        input_ids=take("input_ids", np.int32),
        loss_mask=mask,
        logprobs=take("logprobs", np.float32),
        versions=take("versions", np.int32),
        returns=take("returns", np.float32) if "returns" in arrays else np.where(mask, reward, 0.0).astype(np.float32),
        completion_index=take("completion_index", np.int32)
        if "completion_index" in arrays
        else np.where(mask, index, -1).astype(np.int32),
        temperatures=take("temperatures", np.float32)
        if "temperatures" in arrays
        else np.ones(length, dtype=np.float32),
        reward=reward,
    )


def _short_row(arrays: dict[str, Array], name: str) -> Row:
    wanted = {"input_ids": 1, "output_ids": 1, "reward": 0}
    faults = [f"{key} is missing" for key in wanted if key not in arrays]
    faults += [
        f"{key} must have {dims} dimension{'s' * (dims != 1)}, got shape {list(arrays[key].shape)}"
        for key, dims in wanted.items()
        if key in arrays and arrays[key].ndim != dims
    ]
    faults += [f"{key} is unknown beside output_ids" for key in arrays if key not in wanted]
    if not faults and not (len(arrays["input_ids"]) and len(arrays["output_ids"])):
        faults.append("input_ids and output_ids must each hold a token")
    if not faults and not np.isfinite(arrays["reward"]):
        faults.append(f"reward must be finite, got {arrays['reward']}")
    if faults:
        raise AgentFailed(f"{name} returned a wrong trajectory: " + "; ".join(faults))
    prompt, output = arrays["input_ids"], arrays["output_ids"]
    mask = np.r_[np.zeros(len(prompt), np.bool_), np.ones(len(output), np.bool_)]
    reward = float(arrays["reward"])
    return Row(
        input_ids=np.concatenate((prompt, output)).astype(np.int32),
        loss_mask=mask,
        logprobs=np.zeros(len(mask), np.float32),
        versions=np.full(len(mask), -1, np.int32),
        returns=np.where(mask, reward, 0.0).astype(np.float32),
        completion_index=np.where(mask, 0, -1).astype(np.int32),
        temperatures=np.ones(len(mask), np.float32),
        reward=reward,
        recompute_logprobs=True,
    )
