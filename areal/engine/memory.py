"""How much memory a model takes to train and to serve: arithmetic on its shape, without torch.

Every term follows from what the code keeps, and says where. The sum over the processes and devices of a run is
`sizing.py`'s business. `benchmarks/memory.py` compares the result with what processes really take.

Shapes: T tokens of a pass, D hidden, H heads, A = H times the head dimension (queries), K the same of keys and values,
F intermediate, V vocabulary, L layers, P parameters.
"""

from dataclasses import dataclass

from areal.config.parallel import Ranks
from areal.engine.model.architecture import FAMILIES
from areal.engine.model.shape import ModelShape

FLOAT_BYTES = 4
ITEM_BYTES = {"float32": 4, "bfloat16": 2}
MOMENTS = 2
"""AdamW keeps two numbers for each parameter, in float32."""

HEAD_ELEMENTS = 1 << 24
"""As in training/head.py: logits of so many elements are held at once."""
HEAP_BLOCK_BYTES = 32 << 20
"""glibc's largest threshold: it maps blocks from this size on, whatever it has learnt."""
HEAP_SHARE = 0.5
"""Between 0.4 and 0.7 of the small blocks of a pass were seen to stay resident beyond them (docs/sizing.md)."""
PAIRS_PER_TOKEN = 1024
"""As in training/packing.py: what decides whether sequences share a prefix."""

Terms = dict[str, int]
"""Bytes by what they are for."""


@dataclass(frozen=True)
class AdapterSize:
    """An adapter that is trained in place of a model."""

    rank: int
    targets: tuple[str, ...] = ()
    """Empty = all linear layers but the head."""

    def matrices(self, shape: ModelShape) -> list[tuple[int, int]]:
        """Inputs and outputs of every layer of a model that it changes. Those of experts are not among them."""
        hidden, attention, kv, width = shape.hidden_size, shape.attention_width, shape.kv_width, shape.intermediate_size
        known = {"q_proj": (hidden, attention), "k_proj": (hidden, kv), "v_proj": (hidden, kv)}
        known["o_proj"] = (attention, hidden)
        if not shape.experts_per_token:
            known |= {"gate_proj": (hidden, width), "up_proj": (hidden, width), "down_proj": (width, hidden)}
        in_layer = [known.get(name, (hidden, hidden)) for name in self.targets or known if name != "lm_head"]
        head = [(hidden, shape.vocab_size)] if "lm_head" in self.targets else []
        return in_layer * shape.num_layers + head

    def parameters(self, shape: ModelShape) -> int:
        return sum(self.rank * (inputs + outputs) for inputs, outputs in self.matrices(shape))

    def adapted(self, shape: ModelShape) -> int:
        """Parameters of the model in the layers that it changes."""
        return sum(inputs * outputs for inputs, outputs in self.matrices(shape))


@dataclass(frozen=True)
class Training:
    """How a model is trained, as far as memory goes."""

    tokens: int
    """Of one pass: `actor.max_tokens_per_mb`."""
    ranks: Ranks | None = None
    """None = in one process, by this package's decoder if it knows the architecture."""
    dtype: str = "float32"
    """What is computed in."""
    checkpointing: bool = False
    offload: bool = False
    trie_tokens: int = 0
    """Nodes of the trie that the sequences of a group form; 0 = they share nothing, and need no mask."""
    adapter: AdapterSize | None = None
    """None = the whole model is trained."""

    @property
    def data(self) -> int:
        return 1 if self.ranks is None else self.ranks.data

    @property
    def tensor(self) -> int:
        return 1 if self.ranks is None else self.ranks.tensor

    @property
    def item_bytes(self) -> int:
        """Of what matrix products and attention compute."""
        return ITEM_BYTES[self.dtype]

    @property
    def stream_bytes(self) -> int:
        """Of the residual stream. FSDP computes all in `dtype`, autocast, where nothing is sharded, products alone."""
        return FLOAT_BYTES if self.data == 1 else self.item_bytes


def own_parameters(shape: ModelShape, training: Training) -> int:
    """Those that one process holds. Tensor parallelism divides the matrices of layers and an untied head."""
    layers = shape.num_layers * shape.layer_parameters + shape.head_parameters
    whole = shape.embedding_parameters + shape.other_parameters
    return (layers // training.tensor + whole) // training.data


def trained_parameters(shape: ModelShape, training: Training) -> int:
    """Those of the process that have a gradient and moments. An adapter is whole on every rank."""
    return own_parameters(shape, training) if training.adapter is None else training.adapter.parameters(shape)


def state_terms(shape: ModelShape, training: Training) -> Terms:
    """What a model that is trained keeps from step to step: 16 bytes for each parameter of the process. Of one with an
    adapter: 16 for each of the adapter's, and 4 for the others."""
    own, trained = own_parameters(shape, training), trained_parameters(shape, training)
    terms = {
        "weights": FLOAT_BYTES * (own if training.adapter is None else own + trained),
        "gradients": FLOAT_BYTES * trained,
        "optimizer": MOMENTS * FLOAT_BYTES * trained,
    }
    if _packed(shape, training):
        # model/decoder.py: cosines and sines of every position.
        terms["weights"] += 2 * FLOAT_BYTES * shape.head_dim * shape.max_positions
    return terms


def frozen_bytes(shape: ModelShape, training: Training) -> int:
    """Of a model that is not trained: its weights. Passes keep nothing, so they need less than those that train."""
    return FLOAT_BYTES * own_parameters(shape, training)


def pass_terms(shape: ModelShape, training: Training) -> Terms:
    """What one forward and backward pass takes at its peak, beyond the state."""
    kept = _kept_bytes(shape, training)
    again = training.tokens * layer_token_bytes(shape, training) if training.checkpointing else 0
    in_flight = max(
        _head_bytes(shape, training),
        _final_norm_bytes(shape, training),
        again + _layer_gradient_bytes(shape, training),
        _embedding_gradient_bytes(shape, training) - kept,
    )
    terms = {"activations": kept + again, "in flight": in_flight - again}
    if training.data == 1 and training.dtype == "bfloat16":
        # Autocast makes a copy of every matrix for the pass, and autograd keeps it.
        terms["bfloat16 copies"] = ITEM_BYTES["bfloat16"] * own_parameters(shape, training)
    if training.data > 1:
        terms["gathered"] = gathered_bytes(shape, training)
    return terms


def layer_token_bytes(shape: ModelShape, training: Training) -> int:
    """What autograd keeps of one token in one layer."""
    return sum(_layer_blocks(shape, training)) + _low_rank_bytes(shape, training)


def _low_rank_bytes(shape: ModelShape, training: Training) -> int:
    """What A makes of a token in one layer; the layers' inputs are kept anyway."""
    if training.adapter is None:
        return 0
    return training.item_bytes * training.adapter.rank * len(training.adapter.matrices(shape)) // shape.num_layers


def _layer_blocks(shape: ModelShape, training: Training) -> list[int]:
    """The tensors that autograd keeps of a layer, as bytes of each for a token.

    This package's decoder (model/decoder.py), in float32 whatever the products are computed in: the residual stream
    before each half, and what each norm makes of it (4 D), with the norms' own factors. In the dtype of the products:
    the inputs of both halves (2 D); queries, keys and values as projected, since the values are a view of them (A + 2
    K), rotated queries and keys (A + K), what attention returns (A); gate and up (2 F), the gate's activation, and that
    times up (2 F). Attention also keeps a float32 for each head. Normed queries and keys come on top.

    transformers projects queries, keys and values apart, and keeps them after rotation only. With FSDP in bfloat16 its
    stream is that too, but norms compute in float32 and keep a copy.
    """
    t, item = training.tensor, training.item_bytes
    hidden, attention, kv = shape.hidden_size, shape.attention_width // t, shape.kv_width // t
    width, heads = shape.intermediate_size // t, shape.num_heads // t
    blocks = [FLOAT_BYTES * heads, FLOAT_BYTES, FLOAT_BYTES]
    if _packed(shape, training):
        blocks += [FLOAT_BYTES * hidden] * 4 + [item * hidden] * 2
        blocks += [item * (attention + 2 * kv), item * (attention + kv), item * attention]
        blocks += [item * 2 * width, item * width, item * width]
        if shape.head_norms:
            blocks += [FLOAT_BYTES * (attention + kv), FLOAT_BYTES * (heads + shape.num_kv_heads)]
            blocks += [item * (attention + kv)] if item < FLOAT_BYTES else []
        return blocks
    blocks += [FLOAT_BYTES * hidden] * 2 + [training.stream_bytes * hidden] * 2 + [item * hidden] * 2
    blocks += [item * attention, item * kv, item * kv, item * attention]
    blocks += [item * width] * 4 + [item * hidden] * 2 * shape.experts_per_token
    if shape.head_norms:
        blocks += [FLOAT_BYTES * attention, FLOAT_BYTES * kv, item * attention, item * kv, FLOAT_BYTES * heads]
    return blocks


def _kept_bytes(shape: ModelShape, training: Training) -> int:
    """Of all layers, until the backward pass has reached them; and three times the last layer's stream for the head."""
    each = training.stream_bytes * shape.hidden_size if training.checkpointing else layer_token_bytes(shape, training)
    tokens = shape.num_layers * each + 3 * FLOAT_BYTES * shape.hidden_size
    return training.tokens * tokens + _mask_bytes(shape, training)


def heap_bytes(shape: ModelShape, training: Training) -> int:
    """On a CPU: what the C library does not give back of a pass.

    It takes blocks below 32 MiB from a heap in which freed ones stay, and holes between those that are kept. Larger
    ones are mapped, and gone when they are freed. How much stays cannot be derived; HEAP_SHARE is an observation.
    """
    tokens, layers = training.tokens, 1 if training.checkpointing else shape.num_layers
    small = sum(block for block in _layer_blocks(shape, training) if tokens * block < HEAP_BLOCK_BYTES)
    logits = FLOAT_BYTES * _logit_rows(shape, training) * shape.vocab_size
    return int(HEAP_SHARE * (layers * tokens * small + (logits if logits < HEAP_BLOCK_BYTES else 0)))


def _mask_bytes(shape: ModelShape, training: Training) -> int:
    """Of sequences with common prefixes, who attends to whom: a square for each trie, in float32.

    Where attention is computed in bfloat16, every layer keeps a copy in that.
    """
    squares = training.tokens * min(training.trie_tokens, training.tokens)
    copies = 0 if training.item_bytes == FLOAT_BYTES else 1 if training.checkpointing else shape.num_layers
    return squares * (FLOAT_BYTES + training.item_bytes * copies)


def trie_tokens(prompt: int, answer: int, samples: int) -> int:
    """Nodes of a group's trie, as training/packing.py joins them; 0 = each sequence is computed alone."""
    size, length = prompt + answer, prompt + answer
    joined = 1
    while joined < samples and answer * (2 * size + answer) - length**2 <= PAIRS_PER_TOKEN * prompt:
        size, joined = size + answer, joined + 1
    return size if joined > 1 else 0


def _head_bytes(shape: ModelShape, training: Training) -> int:
    """The logits of a piece of the tokens (training/head.py), and the gradient of the head's matrix.

    Logits become exponentials, and these their gradient, in one place. With bfloat16 they come and go in a copy of it.
    A module of transformers hands its logits over, so that there are two of them; and if there are several pieces,
    autograd sums their gradients up before it adds them to those of earlier passes.
    """
    rows = _logit_rows(shape, training)
    logits = FLOAT_BYTES * rows * shape.vocab_size
    matrix = _head_gradient_bytes(shape, training)
    if _packed(shape, training):
        rounded = ITEM_BYTES["bfloat16"] / FLOAT_BYTES if training.item_bytes < FLOAT_BYTES else 0
        return int((1 + rounded) * (logits + matrix))
    summed = matrix if rows < training.tokens else 0
    return max(2 * logits + summed, logits + matrix + summed)


def _logit_rows(shape: ModelShape, training: Training) -> int:
    return min(training.tokens, max(1, HEAD_ELEMENTS // shape.vocab_size))


def _final_norm_bytes(shape: ModelShape, training: Training) -> int:
    """The gradient of the stream, and what its norm makes of it on the way back."""
    return training.tokens * 4 * FLOAT_BYTES * shape.hidden_size + _waiting_bytes(shape, training)


def _layer_gradient_bytes(shape: ModelShape, training: Training) -> int:
    """Gradients on their way through the layer that comes first, the last one: of gate and up, and of a matrix."""
    width = 2 * shape.intermediate_size // training.tensor
    matrix = FLOAT_BYTES * shape.hidden_size * width
    if training.adapter is not None:  # in its place what B makes, before it is added
        matrix = training.tokens * training.item_bytes * width
    return training.tokens * training.item_bytes * width + matrix + _waiting_bytes(shape, training)


def _waiting_bytes(shape: ModelShape, training: Training) -> int:
    """The gradient of a tied head waits for the embedding's while the layers are computed."""
    return _head_gradient_bytes(shape, training) if shape.tied_embeddings else 0


def _embedding_gradient_bytes(shape: ModelShape, training: Training) -> int:
    """At the end of a pass, when the activations are gone."""
    return (2 if shape.tied_embeddings else 1) * _head_gradient_bytes(shape, training)


def _head_gradient_bytes(shape: ModelShape, training: Training) -> int:
    """Nothing, if the head is frozen; one with an adapter is put together for the pass."""
    frozen = training.adapter is not None and "lm_head" not in training.adapter.targets
    return 0 if frozen else _head_matrix_bytes(shape, training)


def _head_matrix_bytes(shape: ModelShape, training: Training) -> int:
    tensor = 1 if shape.tied_embeddings else training.tensor
    item = training.item_bytes if training.data > 1 else FLOAT_BYTES
    return item * shape.embedding_parameters // tensor


def gathered_bytes(shape: ModelShape, training: Training) -> int:
    """What FSDP puts together of the shards of all ranks, in the dtype of the products.

    A layer that is computed and the one after it, which is on its way, with the buffer it arrives in; the gradient of a
    layer, and its float32 copy for the reduction. What is outside the layers stays until the end of the pass.
    """
    item, layer = training.item_bytes, shape.layer_parameters // training.tensor
    outside = shape.embedding_parameters + shape.head_parameters // training.tensor + shape.other_parameters
    if training.adapter is not None:  # nothing of the model has a gradient
        return item * (3 * layer + outside)
    return (4 * item + FLOAT_BYTES) * layer + item * outside


def _packed(shape: ModelShape, training: Training) -> bool:
    """Whether this package's decoder computes the model, not transformers."""
    return training.ranks is None and shape.family in FAMILIES


SMALLEST_POOL = 128
"""As in inference/kv_cache.py: positions that a sequence has room for at least; it doubles from there."""
MAX_RUNNING = 256
"""As in inference/engine.py: sequences that the embedded engine runs at once."""
PREFIX_MEMORY_SHARE = 0.1
COPIES_MEMORY_SHARE = 0.2
SMALLEST_COPIED_BYTES = 32 << 20
"""As in inference/decoder_runner.py and inference/torch_kernel.py: shares of the memory for cached prefixes and for
copies of the matrices, and from which size on these are copied."""
PACKED_MEMORY_SHARE = 0.25
"""As in native/kernel.py: of the memory, for packed weights."""
SERVER_BATCHED_TOKENS = 8192
"""vLLM's and SGLang's prompts are computed in pieces of about so many tokens."""


@dataclass(frozen=True)
class Serving:
    """How one engine server serves a model, as far as memory goes."""

    sequences: int
    """That run at once."""
    length: int
    """Tokens that a sequence grows to, prompt and answers together."""
    dtype: str = "float32"
    gpus: int = 1
    """That the server spreads the model over."""
    kernel: str = "auto"
    """As `rollout.kernel`; auto is taken to be native on a CPU."""
    adapter: AdapterSize | None = None
    """That it is given in place of whole models."""


def kv_token_bytes(shape: ModelShape, serving: Serving) -> int:
    """Keys and values of one token in all layers, on each GPU of a server."""
    return 2 * shape.num_layers * shape.kv_width * ITEM_BYTES[serving.dtype] // min(serving.gpus, shape.num_kv_heads)


def embedded_terms(shape: ModelShape, serving: Serving, memory_bytes: int, *, on_cpu: bool, remembered: int) -> Terms:
    """The embedded engine. `memory_bytes`: its device's; `remembered`: sequences that end before the weights change."""
    item, token = ITEM_BYTES[serving.dtype], kv_token_bytes(shape, serving)
    own = shape.parameters * item
    terms = {"weights": shape.parameters * FLOAT_BYTES if on_cpu else own}
    if serving.adapter is not None:
        # model/live.py: what the model has in these layers without the adapter, and what they will have with the next.
        terms["adapted layers"] = 2 * serving.adapter.adapted(shape) * (FLOAT_BYTES if on_cpu else item)
    packs = on_cpu and serving.kernel != "torch" and shape.family in FAMILIES
    if packs and own <= PACKED_MEMORY_SHARE * memory_bytes:
        terms["packed weights"] = own
        token = token * FLOAT_BYTES // item  # the native kernel computes in float32
        if 2 * own <= PACKED_MEMORY_SHARE * memory_bytes:
            terms["next version"] = terms["weights"] + own
    elif on_cpu:
        terms |= _torch_terms(own, terms["weights"], serving, memory_bytes)
    rows = _doubled(1, min(serving.sequences, MAX_RUNNING))
    terms["KV cache"] = rows * token * min(_doubled(SMALLEST_POOL, serving.length), shape.max_positions)
    terms["cached prefixes"] = min(int(PREFIX_MEMORY_SHARE * memory_bytes), remembered * serving.length * token)
    return terms


def _torch_terms(own: int, weights: int, serving: Serving, memory_bytes: int) -> Terms:
    """What torch's kernel copies on a CPU: the weights in its dtype; two layouts of matrices, and the next version with
    its own, if there is room."""
    terms, room = {}, COPIES_MEMORY_SHARE * memory_bytes
    if serving.dtype == "bfloat16":
        terms["bfloat16 copies"] = own
    if own >= SMALLEST_COPIED_BYTES and 2 * own <= room:
        terms["faster layouts"] = 2 * own
        if 5 * own <= room:
            terms["next version"] = weights + (own if serving.dtype == "bfloat16" else 0) + 2 * own
    return terms


def server_terms(shape: ModelShape, serving: Serving) -> Terms:
    """vLLM or SGLang on each GPU of a server, without the KV cache, which gets what is left of its share of the GPU."""
    item = ITEM_BYTES[serving.dtype]
    width = (shape.hidden_size + 2 * shape.intermediate_size // serving.gpus) * item
    logits = FLOAT_BYTES * min(serving.sequences, MAX_RUNNING) * shape.vocab_size
    return {"weights": shape.parameters * item // serving.gpus, "prompts": 2 * SERVER_BATCHED_TOKENS * width + logits}


def _doubled(start: int, least: int) -> int:
    while start < least:
        start *= 2
    return start
