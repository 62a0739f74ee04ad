"""A transformers model on several ranks: FSDP2 shards its parameters, tensor parallelism its matrix products.

transformers applies both as it reads the weights, by the plan that each architecture declares, so that no rank holds
more than its part. Without either (one rank) the module is an ordinary one. It stays in evaluation mode, also in
training: without dropout the ranks, one process and the engine compute the same numbers.

Every call below is collective: all ranks make it, in the same order.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from areal.api.errors import ModelError
from areal.config.parallel import Ranks
from areal.engine.model.adapter import LowRank
from areal.engine.model.low_rank import Switch
from areal.engine.sharded.packed_attention import PACKED_ATTENTION, packed_inputs, register_packed_attention
from areal.engine.sharded.trainable import has_experts, language_model_class, require_trainable
from areal.engine.training.head import Picks, Temperatures, by_distribution, logits_logprobs, of_rows
from areal.engine.training.packing import Pack, Span, pack
from areal.engine.training.segments import VarlenKernel
from areal.engine.training.token_sets import DrawnFrom
from areal.engine.transformers.file_layout import FileLayout
from areal.engine.transformers.low_rank import TensorGroup, adapt_module, head_layer
from areal.engine.transformers.model import (
    critic_class,
    read_config,
    read_critic,
    read_module,
    refuse_missing,
    values_of,
)


class ShardedModel:
    def __init__(
        self,
        directory: Path,
        ranks: Ranks,
        device: torch.device,
        *,
        dtype: str = "float32",
        kernel: VarlenKernel | None = None,
        gradient_checkpointing: bool = False,
        offload: bool = False,
        trainable: bool = True,
        value_head: bool = False,
    ) -> None:
        """`dtype`: what is computed in; parameters and gradients are float32. `kernel`: computes attention; None = with
        masks. `offload`: parameters rest in host memory.

        With a value head it is a critic, and gives values where a policy gives log-probs.
        """
        if offload and device.type == "cpu":
            raise ModelError(
                "actor.offload keeps a GPU's parameters in host memory, and this rank has no GPU; leave it out"
            )
        require_trainable(directory, ranks)
        register_packed_attention()
        self.device = device
        self._ranks = ranks
        self._kernel = kernel
        mixed = dtype == "bfloat16"
        self._autocast = mixed and ranks.data == 1
        """FSDP computes in bfloat16 by itself, and there is none."""
        self.module = _open(directory, ranks, device, mixed=mixed, offload=offload, value_head=value_head).eval()
        self.module.requires_grad_(trainable)
        self._layout = FileLayout(self.module)
        # FSDP's hooks are those of the module's call, so what it computes when it is called must be all of a pass.
        self.module.forward = MethodType(_values if value_head else _logprobs, self.module)
        if gradient_checkpointing:
            _checkpoint_layers(self.module)

    def passes(self, spans: Sequence[Span], max_tokens: int) -> Iterator[Pack]:
        if any(span.images for span in spans):
            raise ModelError("ranks train on text only; leave actor.backend unset to train on images")
        return (part.on(self.device) for part in pack(spans, max_tokens, self._kernel))

    def empty_pass(self) -> Pack:
        """The least that can be computed: a rank that has nothing left to do must still take part."""
        (smallest,) = self.passes([Span(np.zeros(2, np.int64), np.ones(1, np.int64), 0)], 1)
        return smallest

    def scores(
        self,
        part: Pack,
        temperatures: Temperatures,
        drawn: DrawnFrom | None = None,
        entropies: Tensor | None = None,
    ) -> Tensor:
        """One number for each asked token of a pass, as a `TrainableModel` gives them."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self._autocast):
            found: Tensor = self.module(part, temperatures, drawn, entropies)
        return found

    def reshard(self) -> None:
        """Let go of whole parameters that a pass without a backward pass has left: they would be used once more, when
        the optimizer has changed their shards."""
        for module in self.module.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    @property
    def head_layer(self) -> str:
        return head_layer(self.module)

    def linear_weights(self) -> list[tuple[str, Tensor]]:
        """The matrix [out, in] of every linear layer, a tied head not among them, as shapes without values."""
        linear = {f"{name}.weight" for name, each in self.module.named_modules() if isinstance(each, nn.Linear)}
        return [(name, shape) for name, shape in self.shapes() if name in linear]

    def adapt(self, layers: Mapping[str, LowRank], scale: float) -> Switch:
        """Compute these layers with matrices that every rank has whole; their gradients are parts of a sum."""
        return adapt_module(self.module, layers, scale, self._tensor_group())

    def _tensor_group(self) -> TensorGroup | None:
        """None = no layer is spread by tensor parallelism."""
        if self._ranks.tensor == 1:
            return None
        spread = (each for each in self.module.parameters() if isinstance(each, DTensor))
        mesh = next(each.device_mesh for each in spread if "tp" in (each.device_mesh.mesh_dim_names or ()))
        return TensorGroup(mesh.get_group("tp"), mesh["tp"].size(), mesh.get_local_rank("tp"))

    def shapes(self) -> list[tuple[str, Tensor]]:
        """What `named_weights` yields, in its order, without values."""
        parameters = self.module.named_parameters()
        return [part for name, parameter in parameters for part in self._layout.shapes(name, parameter.shape)]

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor of the model's files, whole. Parameters are gathered one at a time, when their turn comes."""
        for name, parameter in self.module.named_parameters():
            yield from self._layout.parts(name, whole(parameter.detach()))


def _logprobs(
    module: Any, part: Pack, temperatures: Temperatures, drawn: DrawnFrom | None, entropies: Tensor | None
) -> Tensor:
    """The forward pass of a model, up to log-probs: logits are held for a piece of the tokens at a time."""
    hidden: Tensor = module.get_decoder()(**packed_inputs(part)).last_hidden_state[0, part.sources]
    head, config = module.get_output_embeddings(), module.config.get_text_config()
    cap: float | None = getattr(config, "final_logit_softcapping", None)

    def of_piece(
        hidden: Tensor,
        picks: Picks,
        temperatures: Temperatures,
        drawn: DrawnFrom | None,
        entropies: Tensor | None,
    ) -> Tensor:
        logits: Tensor = head(hidden)
        if cap is not None:
            logits = torch.tanh(logits / cap) * cap
        return logits_logprobs(logits, picks, temperatures, drawn, entropies)

    hidden, picks = by_distribution(hidden, part.picks, temperatures, drawn)
    pieces = [
        (
            hidden[rows],
            own,
            of_rows(temperatures, rows),
            drawn and drawn[rows],
            None if entropies is None else entropies[asked],
        )
        for rows, asked, own in picks.pieces(config.vocab_size)
    ]
    if len(pieces) == 1:
        return of_piece(*pieces[0])
    return torch.cat([checkpoint(of_piece, *piece, use_reentrant=False, preserve_rng_state=False) for piece in pieces])


def _values(
    critic: Any, part: Pack, temperatures: Temperatures, drawn: DrawnFrom | None, entropies: Tensor | None
) -> Tensor:
    """The forward pass of a critic."""
    hidden = critic.base_model(**packed_inputs(part)).last_hidden_state[0, part.sources]
    return values_of(critic, hidden)[part.picks.rows]


def _checkpoint_layers(module: Any) -> None:
    """Compute the layers again in the backward pass instead of keeping their activations."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    module.gradient_checkpointing_enable({"use_reentrant": False})
    for layer in module.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            layer.training = True  # they checkpoint in training only; their parts, which may drop out, stay as they are


def whole(tensor: Tensor) -> Tensor:
    """A tensor of which every rank holds a part, or that every rank holds."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _open(directory: Path, ranks: Ranks, device: torch.device, *, mixed: bool, offload: bool, value_head: bool) -> Any:
    from transformers.distributed import DistributedConfig

    spread = DistributedConfig(
        tp_size=ranks.tensor,
        # Whole experts go to tensor-parallel ranks. Slices of each would be interleaved, which checkpoints cannot hold.
        ep_size=ranks.tensor if has_experts(directory) else 1,
        ep_implementation="all_reduce",
        fsdp_size=ranks.data,
        fsdp_mixed_precision=mixed,
        fsdp_cpu_offload=offload,
    )
    options = {
        "attn_implementation": PACKED_ATTENTION,
        "distributed_config": spread if ranks.count > 1 else None,
    }
    if value_head:
        module = read_critic(critic_class(read_config(directory)), directory, **options)
    else:
        module, missing = read_module(_class_for(directory), directory, **options)
        refuse_missing(missing, directory)
    return module if ranks.count > 1 else module.to(device)


def _class_for(directory: Path) -> Any:
    """transformers' class for a model, which ties the embedding to the head before they are sharded, not only after it.

    Otherwise they are sharded apart and share their parts only where these need no padding: where the vocabulary is not
    a multiple of the ranks, one of the two would never see an optimizer step.
    """
    base: Any = language_model_class(directory)

    class Tied(base):
        @classmethod
        def maybe_distribute_model(cls, model: Any, config: Any, meshes: Any) -> Any:
            share = super().maybe_distribute_model
            if config is None or not model.all_tied_weights_keys:
                return share(model, config, meshes)
            # Tensor parallelism has a rule for each of the two and wants both; FSDP has to find one.
            model = share(model, replace(config, fsdp_size=1), meshes)
            model.tie_weights()
            # What is left to the whole module is one group, in which the two are one parameter.
            model._fsdp_plan = {name: plan for name, plan in model._fsdp_plan.items() if "*" in name}
            model = share(model, replace(config, tp_size=1), meshes)
            model.config.distributed_config, model._tp_size = config, config.tp_size
            return model

    Tied.__name__, Tied.__module__ = base.__name__, base.__module__
    return Tied
