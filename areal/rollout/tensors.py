"""What a RolloutWorkflow returns, checked and turned into rows.

Two shapes are known: the full tensor dict, batch first, and the short form of one completion (1-D prompt `input_ids`,
`output_ids`, scalar `reward`), whose log-probs the trainer recomputes. Either may have `images`: encoded pictures in
the order of their places, a list for each row, in the short form one list. Everything wrong is named at once.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from areal.api.errors import AgentFailed
from areal.api.messages import Array, Row

REQUIRED = ("input_ids", "loss_mask", "logprobs", "versions", "rewards")
OPTIONAL = ("attention_mask", "returns", "completion_index", "temperatures", "group_id", "truncated")
PER_ROW = ("rewards", "group_id", "truncated")
"""Fields of shape [batch]; the others have [batch, length]."""
SHORT = {"input_ids": 1, "output_ids": 1, "reward": 0}
"""Dimensions of the short form's fields."""


def rows_of(tensors: Any, name: str, temperature: float | None = 1.0) -> list[Row]:
    """Rows of a workflow's result; `AgentFailed` names every missing or wrong field.

    `temperature` is what its tokens were sampled at, where it does not say so itself; None = at several, so it must.
    """
    if not isinstance(tensors, Mapping):
        raise AgentFailed(f"{name} must return a dict of tensors or None, got {type(tensors).__name__}")
    is_short = "output_ids" in tensors
    required = tuple(SHORT) if is_short else REQUIRED
    faults = [f"{key} is missing" for key in required if key not in tensors]
    if temperature is None and "temperatures" not in tensors:
        faults.append("temperatures is missing, though its calls differ in temperature")
    numbers = {key: value for key, value in tensors.items() if key != "images"}
    arrays, unreadable = _read(numbers)
    faults += unreadable + (_short_faults(arrays) if is_short else _faults(arrays))
    images = tensors.get("images")
    if images is not None:
        faults += _image_faults([images]) if is_short else _row_faults(images, arrays) or _image_faults(images)
    if faults:
        raise AgentFailed(f"{name} returned a wrong trajectory: " + "; ".join(faults))
    sampled_at = 1.0 if temperature is None else temperature
    if is_short:
        rows = [_short_row(arrays, sampled_at)]
    else:
        rows = [_row(arrays, index, sampled_at) for index in range(len(arrays["rewards"]))]
    if images is not None:
        for row, shown in zip(rows, [images] if is_short else images, strict=True):
            row.images = list(shown)
    return rows


def _read(tensors: Mapping[str, Any]) -> tuple[dict[str, Array], list[str]]:
    """Every field that can be read as an array of numbers, and the faults of those that cannot."""
    arrays, faults = {}, []
    for key, value in tensors.items():
        try:
            arrays[key] = value.numpy(force=True) if hasattr(value, "detach") else np.asarray(value)
        except (TypeError, ValueError) as error:
            faults.append(f"{key} cannot be read as numbers: {error}")
            continue
        if arrays[key].dtype.kind not in "biuf":
            faults.append(f"{key} must be numbers, got {arrays.pop(key).dtype}")
    return arrays, faults


def _faults(arrays: dict[str, Array]) -> list[str]:
    faults = [f"{key} is unknown" for key in arrays if key not in (*REQUIRED, *OPTIONAL)]
    if "input_ids" not in arrays:
        return faults
    shape = arrays["input_ids"].shape
    if len(shape) != 2 or 0 in shape:
        return [*faults, f"input_ids must have shape [batch, length], got {list(shape)}"]
    for key, array in arrays.items():
        wanted = shape[:1] if key in PER_ROW else shape
        if array.shape != wanted:
            faults.append(f"{key} must have shape {list(wanted)}, got {list(array.shape)}")
        elif array.dtype.kind == "f" and not np.isfinite(array).all():
            faults.append(f"{key} must be finite")
    return faults + _meaning_faults(arrays)


def _meaning_faults(arrays: dict[str, Array]) -> list[str]:
    faults = []
    if arrays["input_ids"].dtype.kind not in "iu":
        faults.append(f"input_ids must be integers, got {arrays['input_ids'].dtype}")
    shape = arrays["input_ids"].shape
    mask, attention = arrays.get("loss_mask"), arrays.get("attention_mask")
    if mask is not None and mask.shape == shape:
        if mask[:, 0].any():
            faults.append("loss_mask must be 0 on the first token, which nothing predicts")
        if not mask.any(axis=1).all():
            faults.append("loss_mask must have a token to train on in every row")
    if attention is not None and attention.shape == shape and not attention.all():
        if (np.diff(attention.astype(np.bool_).astype(np.int8), axis=1) > 0).any():
            faults.append("attention_mask must be 1 on tokens and then 0: padding belongs on the right")
        if mask is not None and mask.shape == shape and (mask.astype(np.bool_) & (attention == 0)).any():
            faults.append("loss_mask must be 0 where attention_mask is")
    return faults


def _row_faults(images: Any, arrays: dict[str, Array]) -> list[str]:
    if not isinstance(images, list | tuple):
        return [f"images must be a list with a list of encoded bytes for each row, got {type(images).__name__}"]
    ids = arrays.get("input_ids")
    if ids is None or ids.ndim != 2 or len(images) == len(ids):
        return []
    return [f"images must have a list for each of the {len(ids)} rows, got {len(images)}"]


def _image_faults(images: Sequence[Any]) -> list[str]:
    """Of pictures by row."""
    strangers = {type(shown).__name__ for shown in images if not isinstance(shown, list | tuple)}
    if strangers:
        return [f"images must hold a list for each row, got {', '.join(sorted(strangers))}"]
    strangers = {type(image).__name__ for shown in images for image in shown if not isinstance(image, bytes)}
    if strangers:
        names = ", ".join(sorted(strangers))
        return [f"images must hold encoded bytes, got {names}; use areal.utils.images.encode_image"]
    return []


def _row(arrays: dict[str, Array], index: int, temperature: float) -> Row:
    attention = arrays.get("attention_mask")
    length = arrays["input_ids"].shape[1] if attention is None else np.count_nonzero(attention[index])

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
        temperatures=take("temperatures", np.float32) if "temperatures" in arrays else _temperatures(mask, temperature),
        reward=reward,
        truncated=bool(arrays["truncated"][index]) if "truncated" in arrays else False,
    )


def _temperatures(mask: Array, temperature: float) -> Array:
    return np.where(mask, temperature, 1.0).astype(np.float32)


def _short_faults(arrays: dict[str, Array]) -> list[str]:
    faults = [f"{key} is unknown beside output_ids" for key in arrays if key not in SHORT]
    for key, dims in SHORT.items():
        if key not in arrays:
            continue
        array = arrays[key]
        if array.ndim != dims:
            faults.append(f"{key} must have {dims} dimension{'s' * (dims != 1)}, got shape {list(array.shape)}")
        elif not array.size:
            faults.append(f"{key} must hold a token")
        elif dims and array.dtype.kind not in "iu":
            faults.append(f"{key} must be integers, got {array.dtype}")
        elif not np.isfinite(array).all():
            faults.append(f"{key} must be finite, got {array}")
    return faults


def _short_row(arrays: dict[str, Array], temperature: float) -> Row:
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
        temperatures=_temperatures(mask, temperature),
        reward=reward,
        recompute_logprobs=True,
    )
