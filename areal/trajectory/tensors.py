"""The tensor dict that users know: its fields, how it is built, and how what a workflow returns is read.

A full dict is batch first and padded on the right. The short form describes one completion: 1-D prompt `input_ids`,
1-D `output_ids` and a scalar `reward`; the trainer recomputes its log-probs. Either may have `images`: encoded bytes in
the order of their places in the tokens, one list per row in the full dict, one list in the short form.

`returns` may differ from token to token of a completion. Rows that a workflow gives different `group_id`s are compared
with rows of the same task and id only, in whichever of the task's episodes they are.

Joining and padding are left to `areal.utils.data`. torch is loaded when the first dict is built, not by importing this.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from areal.api.errors import AgentFailed
from areal.api.io_struct import ModelResponse
from areal.api.messages import Array, GroupResult, Row

if TYPE_CHECKING:
    from torch import Tensor

REQUIRED = ("input_ids", "loss_mask", "logprobs", "versions", "rewards")
OPTIONAL = ("attention_mask", "returns", "completion_index", "temperatures", "group_id", "truncated")
PER_ROW = ("rewards", "group_id", "truncated")
"""Fields of shape [batch]; all others are [batch, length]."""
ROW_ARRAYS = ("input_ids", "loss_mask", "logprobs", "versions", "returns", "completion_index", "temperatures")
"""Fields that are arrays of a `Row` under the same name."""
INTEGERS = ("input_ids", "output_ids", "group_id")
TOKEN_IDS = ("input_ids", "output_ids")
LARGEST_ID = np.iinfo(np.int32).max
SHORT_FORM = {"input_ids": 1, "output_ids": 1, "reward": 0}
"""Fields of the short form and their number of dimensions."""


@dataclass(frozen=True)
class RowLimits:
    """What a model can compute."""

    vocab_size: int | None = None
    """Token ids lie below it; None = not known."""
    max_positions: int | None = None
    """Tokens that a row may have; None = not known."""

    def hold(self, ids: Array) -> bool:
        """Whether a model can compute these tokens."""
        fit = self.max_positions is None or len(ids) <= self.max_positions
        return fit and (self.vocab_size is None or int(ids.max(initial=0)) < self.vocab_size)


UNLIMITED = RowLimits()


def tensors_of_group(group: GroupResult) -> dict[str, Any]:
    """All rows of all episodes: `group_id` is the workflow's, or else the task's number; `images` is there if a row has
    any."""
    import torch

    rows = [row for episode in group.episodes for row in episode.rows]
    tensors: dict[str, Any] = tensors_of_rows(rows)
    tensors["group_id"] = torch.tensor([group.task_id if row.group_id is None else row.group_id for row in rows])
    if any(row.images for row in rows):
        tensors["images"] = [row.images for row in rows]
    return tensors


def tensors_of_rows(rows: Sequence[Row]) -> "dict[str, Tensor]":
    """The full dict of rows that an export gave, without their images."""
    import torch

    from areal.utils.data import concat_padded_tensors

    def single(row: Row) -> dict[str, Any]:
        arrays = {name: torch.from_numpy(getattr(row, name))[None] for name in ROW_ARRAYS}
        return arrays | {"rewards": torch.tensor([row.reward]), "truncated": torch.tensor([row.truncated])}

    return concat_padded_tensors([single(row) for row in rows])


def tensors_of_response(response: ModelResponse, reward: float, temperature: float) -> "dict[str, Tensor]":
    """The full dict of one completion, [1, length]; the loss mask is True on its sampled tokens."""
    import torch

    prompt, length = response.input_len, response.input_len + response.output_len
    fields = {
        "input_ids": np.array([response.input_tokens + response.output_tokens]),
        "attention_mask": np.ones((1, length), np.bool_),
        "loss_mask": np.zeros((1, length), np.bool_),
        "logprobs": np.zeros((1, length), np.float32),
        "versions": np.full((1, length), -1),
        "temperatures": np.ones((1, length), np.float32),
        "rewards": np.array([reward], np.float32),
        "truncated": np.array([response.stop_reason != "stop"]),
    }
    fields["loss_mask"][0, prompt:] = True
    fields["logprobs"][0, prompt:] = response.output_logprobs
    fields["versions"][0, prompt:] = response.output_versions
    fields["temperatures"][0, prompt:] = temperature
    return {name: torch.from_numpy(array) for name, array in fields.items()}


def row_of_response(response: ModelResponse, reward: float, temperature: float) -> Row:
    """The row that `rows_of` makes of `tensors_of_response`, without tensors on the way."""
    prompt, length = response.input_len, response.input_len + response.output_len
    loss_mask, completion_index = np.zeros(length, np.bool_), np.zeros(length, np.int32)
    logprobs, returns = np.zeros(length, np.float32), np.zeros(length, np.float32)
    temperatures = np.empty(length, np.float32)
    loss_mask[prompt:] = True
    completion_index[:prompt] = -1
    logprobs[prompt:] = response.output_logprobs
    returns[prompt:] = reward
    temperatures[:prompt], temperatures[prompt:] = 1.0, temperature
    return Row(
        input_ids=np.array(response.input_tokens + response.output_tokens, np.int32),
        loss_mask=loss_mask,
        logprobs=logprobs,
        versions=np.array([-1] * prompt + response.output_versions, np.int32),
        returns=returns,
        completion_index=completion_index,
        temperatures=temperatures,
        reward=float(np.float32(reward)),
        truncated=response.stop_reason != "stop",
    )


def check_row(row: Row, name: str, limits: RowLimits = UNLIMITED) -> None:
    """Raises AgentFailed if the row of an engine's answer is not one that the model can be trained on."""
    faults = [] if limits.hold(row.input_ids) else _limit_faults({"input_ids": row.input_ids}, limits)
    if not np.isfinite(row.logprobs).all():
        faults.append("logprobs must be finite in float32")
    if faults:
        raise AgentFailed(f"{name} returned a wrong trajectory: " + "; ".join(faults))


def rows_of(tensors: Any, name: str, temperature: float | None = 1.0, limits: RowLimits = UNLIMITED) -> list[Row]:
    """The rows of what the workflow called `name` returned. Raises AgentFailed, which lists everything that is wrong.

    `temperature` is what its tokens were sampled at if the dict does not say; None = its calls differ, so it must say.
    """
    if not isinstance(tensors, Mapping):
        raise AgentFailed(f"{name} must return a dict of tensors or None, got {type(tensors).__name__}")
    is_short = "output_ids" in tensors
    faults = [f"{key} is missing" for key in (SHORT_FORM if is_short else REQUIRED) if key not in tensors]
    if temperature is None and "temperatures" not in tensors:
        faults.append("temperatures is missing, though its calls differ in temperature")
    arrays, unreadable = _read_arrays(tensors)
    faults += unreadable + (_short_form_faults(arrays) if is_short else _faults(arrays))
    faults += _limit_faults(arrays, limits)
    images = tensors.get("images")
    if images is not None:
        images = [images] if is_short else images
        faults += _image_faults(images, 1 if is_short else _row_count(arrays))
    if faults:
        raise AgentFailed(f"{name} returned a wrong trajectory: " + "; ".join(faults))
    sampled_at = 1.0 if temperature is None else temperature
    if is_short:
        rows = [_short_form_row(arrays, sampled_at)]
    else:
        rows = [_row(arrays, index, sampled_at) for index in range(len(arrays["rewards"]))]
    if images is not None:
        for row, own in zip(rows, images, strict=True):
            row.images = list(own)
    return rows


def _read_arrays(tensors: Mapping[str, Any]) -> tuple[dict[str, Array], list[str]]:
    """Every field but `images` that can be read as an array of numbers, and what is wrong with the others."""
    arrays, faults = {}, []
    for key, value in tensors.items():
        if key == "images":
            continue
        try:
            array = value.numpy(force=True) if hasattr(value, "detach") else np.asarray(value)
        except (TypeError, ValueError) as error:
            faults.append(f"{key} cannot be read as numbers: {error}")
            continue
        if array.dtype.kind in "biuf":
            arrays[key] = array
        else:
            faults.append(f"{key} must be numbers, got {array.dtype}")
    return arrays, faults


def _faults(arrays: dict[str, Array]) -> list[str]:
    faults = [f"{key} is unknown" for key in arrays if key not in (*REQUIRED, *OPTIONAL)]
    if "input_ids" not in arrays:
        return faults
    shape = arrays["input_ids"].shape
    if len(shape) != 2 or 0 in shape:
        return [*faults, f"input_ids must have shape [batch, length], got {list(shape)}"]
    for key, array in arrays.items():
        expected = shape[:1] if key in PER_ROW else shape
        if array.shape != expected:
            faults.append(f"{key} must have shape {list(expected)}, got {list(array.shape)}")
        else:
            faults += _number_faults(key, _without_padding(array, arrays) if key == "input_ids" else array)
    whole = {key: array for key, array in arrays.items() if array.shape == shape}
    return faults + _mask_faults(whole) + _trained_token_faults(whole)


def _limit_faults(arrays: dict[str, Array], limits: RowLimits) -> list[str]:
    """What the model cannot compute, which would end the trainer."""
    faults, length = [], 0
    for key in TOKEN_IDS:
        ids = arrays.get(key)
        if ids is None or not ids.size or ids.dtype.kind not in "iu":
            continue
        tokens = _without_padding(ids, arrays)
        length += ids.shape[-1] if tokens is ids else int(np.count_nonzero(arrays["attention_mask"], axis=1).max())
        largest = int(tokens.max(initial=0))
        if limits.vocab_size is not None and largest >= limits.vocab_size:
            faults.append(
                f"{key} must lie in the model's vocabulary, 0 to {limits.vocab_size - 1}, got {largest}; encode with "
                "the model's own tokenizer"
            )
    if limits.max_positions is not None and length > limits.max_positions:
        faults.append(
            f"a row must have at most {limits.max_positions} tokens, the model's positions, got {length}; shorten the "
            "prompt or lower max_new_tokens"
        )
    return faults


def _number_faults(key: str, array: Array) -> list[str]:
    """Numbers that the training row's dtype, or the model, cannot hold."""
    if key in INTEGERS and array.dtype.kind not in "iu":
        return [f"{key} must be integers, got {array.dtype}"]
    if key in TOKEN_IDS and array.size and not 0 <= int(array.min()) <= int(array.max()) <= LARGEST_ID:
        return [f"{key} must lie in 0 to {LARGEST_ID}, got {array.min()} to {array.max()}"]
    if array.dtype.kind == "f" and not _is_finite_float32(array):
        return [f"{key} must be finite in float32"]
    return []


def _without_padding(ids: Array, arrays: dict[str, Array]) -> Array:
    """Padding is ignored."""
    attention = arrays.get("attention_mask")
    return ids if attention is None or attention.shape != ids.shape else ids[attention != 0]


def _is_finite_float32(array: Array) -> bool:
    with np.errstate(over="ignore"):
        return bool(np.isfinite(array.astype(np.float32)).all())


def _trained_token_faults(arrays: dict[str, Array]) -> list[str]:
    """Of fields [batch, length]: what a trained token must have."""
    if "loss_mask" not in arrays:
        return []
    trained, faults = arrays["loss_mask"].astype(np.bool_), []
    if "temperatures" in arrays and (arrays["temperatures"][trained] <= 0).any():
        faults.append("temperatures must be > 0 where loss_mask is 1; greedy tokens have 1")
    if "completion_index" in arrays and (arrays["completion_index"][trained] < 0).any():
        faults.append("completion_index must be >= 0 where loss_mask is 1")
    return faults


def _mask_faults(arrays: dict[str, Array]) -> list[str]:
    """Of fields [batch, length]."""
    faults = []
    loss, attention = arrays.get("loss_mask"), arrays.get("attention_mask")
    if loss is not None:
        if loss[:, 0].any():
            faults.append("loss_mask must be 0 on the first token, which nothing predicts")
        if not loss.any(axis=1).all():
            faults.append("loss_mask must have a token to train on in every row")
    if attention is not None and not attention.all():
        if (np.diff(attention.astype(np.bool_).astype(np.int8), axis=1) > 0).any():
            faults.append("attention_mask must be 1 on tokens and then 0: padding belongs on the right")
        if loss is not None and (loss.astype(np.bool_) & (attention == 0)).any():
            faults.append("loss_mask must be 0 where attention_mask is")
    return faults


def _short_form_faults(arrays: dict[str, Array]) -> list[str]:
    faults = [f"{key} is unknown next to output_ids" for key in arrays if key not in SHORT_FORM]
    for key, dims in SHORT_FORM.items():
        if key not in arrays:
            continue
        array = arrays[key]
        if array.ndim != dims:
            faults.append(f"{key} must have {dims} dimension{'s' * (dims != 1)}, got shape {list(array.shape)}")
        elif not array.size:
            faults.append(f"{key} must hold a token")
        else:
            faults += _number_faults(key, array)
    return faults


def _row_count(arrays: dict[str, Array]) -> int | None:
    """None = `input_ids` does not say."""
    ids = arrays.get("input_ids")
    return len(ids) if ids is not None and ids.ndim == 2 else None


def _image_faults(images: Any, rows: int | None) -> list[str]:
    if not isinstance(images, list | tuple):
        return [f"images must be a list with a list of encoded bytes for each row, got {type(images).__name__}"]
    if rows is not None and len(images) != rows:
        return [f"images must have a list for each of the {rows} rows, got {len(images)}"]
    wrong = {type(own).__name__ for own in images if not isinstance(own, list | tuple)}
    if wrong:
        return [f"images must hold a list for each row, got {', '.join(sorted(wrong))}"]
    wrong = {type(image).__name__ for own in images for image in own if not isinstance(image, bytes)}
    if wrong:
        names = ", ".join(sorted(wrong))
        return [f"images must hold encoded bytes, got {names}; use areal.utils.images.encode_image"]
    return []


def _row(arrays: dict[str, Array], index: int, temperature: float) -> Row:
    """The `index`-th row without its padding; returns, completion and temperature are derived where they are absent."""
    attention = arrays.get("attention_mask")
    length = arrays["input_ids"].shape[1] if attention is None else np.count_nonzero(attention[index])

    def take(key: str, dtype: type[np.generic]) -> Array:
        return np.ascontiguousarray(arrays[key][index, :length], dtype=dtype)

    mask = take("loss_mask", np.bool_)
    reward = float(arrays["rewards"][index])

    def take_or_fill(key: str, dtype: type[np.generic], sampled: float, prompt: float) -> Array:
        return take(key, dtype) if key in arrays else np.where(mask, sampled, prompt).astype(dtype)

    return Row(
        input_ids=take("input_ids", np.int32),
        loss_mask=mask,
        logprobs=take("logprobs", np.float32),
        versions=take("versions", np.int32),
        returns=take_or_fill("returns", np.float32, reward, 0.0),
        completion_index=take_or_fill("completion_index", np.int32, index, -1),
        temperatures=take_or_fill("temperatures", np.float32, temperature, 1.0),
        reward=reward,
        truncated=bool(arrays["truncated"][index]) if "truncated" in arrays else False,
        group_id=int(arrays["group_id"][index]) if "group_id" in arrays else None,
    )


def _short_form_row(arrays: dict[str, Array], temperature: float) -> Row:
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
        temperatures=np.where(mask, temperature, 1.0).astype(np.float32),
        reward=reward,
        recompute_logprobs=True,
    )
