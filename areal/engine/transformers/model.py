"""A transformers model whose parameters are views of one flat float32 buffer.

So its weights are published, hashed and stepped like the decoder's. The module stays in evaluation mode, also in
training: without dropout engine and trainer compute the same numbers. Sequences are padded on the right, where causal
attention does not look. Below the model: the facts that configs state under various names.

Shapes: B sequences, L positions, C columns whose logits are wanted, V vocabulary.
"""

import inspect
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from areal.api.errors import ModelError, RequestError
from areal.api.messages import Array
from areal.engine.model.device import CPU, to_device
from areal.engine.model.published import NamedTensors
from areal.engine.model.weights import VALUE_HEAD
from areal.engine.transformers.file_layout import FileLayout
from areal.engine.transformers.images import ImageInputs, Images
from areal.utils.shorten import first_line

MAX_LOGITS = 1 << 26
"""Logits held at once; a single sequence may take more."""
_PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")


class TransformersModel:
    def __init__(
        self,
        directory: Path,
        *,
        trainable: bool = False,
        device: torch.device = CPU,
        with_weights: bool = True,
        value_head: bool = False,
    ) -> None:
        """Read a Hugging Face directory to `device`; gradients of a trainable model accumulate in `flat_grad`.

        Without weights it has random ones, until some are published to it. With a value head it is a critic.
        """
        self.directory = directory
        self.value_head = value_head
        self.module = _load(directory, with_weights, value_head)
        config = self.module.config
        text = config.get_text_config()
        self.vocab_size: int = text.vocab_size
        self.max_positions = positions_of(config)
        self.flat, self.matrices = _flatten(self.module)
        if device.type != "cpu":
            self.flat = _move(self.module, self.flat, device)
        self.device = device
        """Matrices come before everything else; `matrices` is how many values they have."""
        self.flat_grad = torch.zeros_like(self.flat) if trainable else None
        self._attach_gradients()
        self._layout = FileLayout(self.module)
        self._parameters = inspect.signature(self.module.forward).parameters
        placeholders = _placeholders_of(config)
        self._placeholders = torch.tensor(sorted(placeholders), dtype=torch.long)
        self._placeholders_there = to_device(self._placeholders, device)
        """The same on the device."""
        self._filler = next(token for token in range(self.vocab_size) if token not in placeholders)
        self.images = ImageInputs(directory, placeholders, device) if _takes_images(config) else None

    def check(self, ids: Sequence[int] | Array, images: Images) -> None:
        """Raise RequestError for bytes that are not images, or if `ids` do not have their placeholders."""
        if self.images is not None:
            self.images.check(ids, images)
        elif images:
            raise RequestError(f"the model takes no images, the request has {len(images)}; use a vision-language model")

    def shape(self, images: Images) -> tuple[Any, ...]:
        """Sequences whose images have one shape can be computed together."""
        return () if self.images is None else self.images.shape(images)

    def logits(self, ids: Tensor, images: Sequence[Images], columns: Tensor, **options: Any) -> Tensor:
        """Logits [B,C,V] after the tokens in `columns` of `ids` [B,L]; an image's placeholder is never predicted.

        Tensors are on the model's device (`sent`).
        """
        inputs: dict[str, Any] = {"input_ids": ids, "use_cache": False, **options}
        if any(images):
            assert self.images is not None
            inputs |= self.images.batch(images)
        inputs |= {name: torch.isin(ids, self._placeholders_there).long() for name in self._type_inputs()}
        if "logits_to_keep" in self._parameters:
            logits: Tensor = self.module(**inputs, logits_to_keep=columns).logits
        else:
            logits = self.module(**inputs).logits[:, columns]
        if len(self._placeholders):
            logits = logits.index_fill(-1, self._placeholders_there, -torch.inf)
        return logits

    def values(self, ids: Tensor) -> Tensor:
        """What a critic expects [B,L] after each token of `ids` [B,L]."""
        return values_of(self.module, self.module.base_model(input_ids=ids, use_cache=False).last_hidden_state)

    def sent(self, tensor: Tensor) -> Tensor:
        """A host tensor on the model's device."""
        return to_device(tensor, self.device)

    def padded(self, rows: Sequence[Sequence[int]]) -> Tensor:
        """Ids [B,L] on the host. Nothing attends to the padding, but it must not be a placeholder."""
        length = max(map(len, rows))
        return torch.tensor([[*row, *[self._filler] * (length - len(row))] for row in rows])

    def as_text(self, ids: Tensor) -> list[int]:
        """`ids` without placeholders."""
        kept: list[int] = torch.where(torch.isin(ids, self._placeholders), self._filler, ids).tolist()
        return kept

    def fits(self, count: int, length: int, columns: int, max_tokens: int) -> bool:
        """Whether that many sequences can be computed at once: their tokens with padding, and their logits."""
        return count * length <= max_tokens and count * columns * self.vocab_size <= MAX_LOGITS

    def length_with_images(self, ids: Array) -> int:
        """How many of `ids` it takes to have every placeholder."""
        places = np.flatnonzero(np.isin(ids, self._placeholders.numpy()))
        return int(places[-1]) + 1 if len(places) else 0

    def named_weights(self) -> NamedTensors:
        """Every tensor of the model's files; they are the parameters, tied ones once, or views of them."""
        return self._named(lambda name: True)

    def named_views(self, flat: Tensor) -> NamedTensors:
        """A buffer that is laid out as the parameters are, by their names in the module."""
        names = {parameter: name for name, parameter in self.module.named_parameters()}
        at = 0
        for parameter in _in_order(self.module):
            yield names[parameter], flat[at : at + parameter.numel()].view(parameter.shape)
            at += parameter.numel()

    def linear_weights(self) -> NamedTensors:
        """The matrices of linear layers among them; a tied head goes by the embedding's name and is none."""
        linear = {f"{name}.weight" for name, module in self.module.named_modules() if isinstance(module, nn.Linear)}
        return self._named(linear.__contains__)

    def load(self, directory: Path) -> None:
        """Take the weights of another directory of the same architecture."""
        flat, _ = _flatten(_load(directory, value_head=self.value_head))
        if flat.shape != self.flat.shape:
            raise ModelError(f"{str(directory)!r} holds {len(flat)} parameters, this model has {len(self.flat)}")
        self.flat.copy_(flat)

    def save(self, directory: Path) -> None:
        """Write a directory that `from_pretrained` loads, with the files of the processor."""
        clones: dict[int, Tensor] = {}
        state = self.module.state_dict(keep_vars=True)
        for name, tensor in state.items():  # tied weights stay one tensor
            state[name] = clones.setdefault(id(tensor), tensor.detach().to(CPU, copy=True))
        with no_progress_bars():
            self.module.save_pretrained(directory, state_dict=state)
        for name in _PROCESSOR_FILES:
            if (self.directory / name).exists() and self.directory != directory:
                shutil.copyfile(self.directory / name, directory / name)

    def _named(self, wanted: Callable[[str], bool]) -> NamedTensors:
        for name, parameter in self.module.named_parameters():
            if wanted(name):
                yield from self._layout.parts(name, parameter.detach())

    def _attach_gradients(self) -> None:
        """Make parameters leaves whose gradients accumulate in `flat_grad`, or constants without one."""
        at = 0
        for parameter in _in_order(self.module):
            parameter.requires_grad_(self.flat_grad is not None)
            if self.flat_grad is not None:
                parameter.grad = self.flat_grad[at : at + parameter.numel()].view_as(parameter)
            at += parameter.numel()

    def _type_inputs(self) -> list[str]:
        """Inputs that tell image placeholders from text; in text models `token_type_ids` means something else."""
        names = ("mm_token_type_ids", "token_type_ids") if self.images is not None else ()
        return [name for name in names if name in self._parameters]


def _load(directory: Path, with_weights: bool = True, value_head: bool = False) -> Any:
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    config = read_config(directory)
    if value_head:
        return read_critic(critic_class(config), directory).eval()
    loader = AutoModelForImageTextToText if _takes_images(config) else AutoModelForCausalLM
    if not with_weights:
        return loader.from_config(config, dtype=torch.float32).eval()
    module, missing = read_module(loader, directory)
    refuse_missing(missing, directory)
    return module.eval()


def read_module(loader: Any, directory: Path, **options: Any) -> tuple[Any, set[str]]:
    """What a class of transformers makes of a directory, in float32, and the names of weights that are not there."""
    try:
        with no_progress_bars():
            module, info = loader.from_pretrained(directory, dtype=torch.float32, output_loading_info=True, **options)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ModelError(f"transformers cannot load the model in {str(directory)!r}: {first_line(error)}") from None
    return module, set(info["missing_keys"])


def refuse_missing(names: set[str], directory: Path) -> None:
    if names:
        raise ModelError(f"the weights in {str(directory)!r} lack {', '.join(sorted(names)[:5])}")


def critic_class(config: Any) -> Any:
    """transformers' class for a critic: its sequence classifiers have one linear head on the hidden states."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING

    if _takes_images(config) or type(config) not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        raise ModelError(
            f"a critic must be a language model that transformers has a sequence classifier of, got a "
            f"{config.model_type}; set critic.path to another model, or leave it out"
        )
    return MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING[type(config)]


def read_critic(loader: Any, directory: Path, **options: Any) -> Any:
    """A sequence classifier with one label; one that starts from a language model values everything at 0."""
    with _no_load_report():
        module, missing = read_module(loader, directory, num_labels=1, **options)
    refuse_missing(missing - {VALUE_HEAD}, directory)
    if missing:
        with torch.no_grad():
            module.score.weight.zero_()
    return module


@contextmanager
def _no_load_report() -> Iterator[None]:
    """Keep transformers from warning of a head that is new, and of one that is left out."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


def values_of(critic: Any, hidden: Tensor) -> Tensor:
    """[..., D] -> [...], in float32 whatever `hidden` was computed in"""
    return (hidden.float() * critic.score.weight[0].float()).sum(-1)


def _flatten(module: nn.Module) -> tuple[Tensor, int]:
    """Move the parameters into one buffer, matrices first; the buffer, and how many values the matrices have."""
    parameters = _in_order(module)
    flat = torch.empty(sum(parameter.numel() for parameter in parameters))
    at = 0
    for parameter in parameters:
        view = flat[at : at + parameter.numel()].view_as(parameter)
        view.copy_(parameter.detach())
        parameter.data = view
        at += parameter.numel()
    return flat, sum(parameter.numel() for parameter in parameters if parameter.dim() > 1)


def _move(module: nn.Module, flat: Tensor, device: torch.device) -> Tensor:
    """Replace the parameters, which are views of `flat`, and the buffers by those on a device; returns `flat` there."""
    there = flat.to(device)
    moved: dict[nn.Parameter, nn.Parameter] = {}
    at = 0
    for parameter in _in_order(module):
        moved[parameter] = nn.Parameter(there[at : at + parameter.numel()].view(parameter.shape))
        at += parameter.numel()
    for owner in module.modules():  # `module.to` would replace tied weights one by one where it cannot change them
        held = owner._parameters
        held.update({name: moved[each] for name, each in held.items() if each is not None})
        buffers = owner._buffers
        buffers.update({name: each.to(device) for name, each in buffers.items() if each is not None})
    return there


def _in_order(module: nn.Module) -> list[nn.Parameter]:
    """Matrices first; tied weights are one parameter."""
    return sorted(module.parameters(), key=lambda parameter: parameter.dim() <= 1)


_POSITIONS = ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length")
_UNLIMITED = 1 << 17
"""Positions of a model that names no limit, as recurrent ones do."""
_PLACEHOLDERS = ("image_token_id", "image_token_index", "video_token_id", "audio_token_id")
"""Configs' names for the tokens that stand for something other than text."""


def read_config(directory: Path) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(directory)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"transformers cannot read the model in {str(directory)!r}: {first_line(error)}") from None


def positions_of(config: Any) -> int:
    """How many tokens a sequence may have."""
    text = config.get_text_config()
    return next((int(getattr(text, name)) for name in _POSITIONS if getattr(text, name, None)), _UNLIMITED)


def _takes_images(config: Any) -> bool:
    return getattr(config, "vision_config", None) is not None


def _placeholders_of(config: Any) -> set[int]:
    found = (getattr(config, name, None) for name in _PLACEHOLDERS)
    return {token for token in found if isinstance(token, int) and token >= 0}


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """Keep transformers from drawing bars while it reads and writes."""
    from transformers.utils import logging

    drawn = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if drawn:
            logging.enable_progress_bar()
