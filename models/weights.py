"""The one table of a model's weights and of what a block keeps for its backward. Torch-free.

Everything that must know the model reads this table: shapes and counts, FLOPs, initialisation, the
tensor-parallel plan, FSDP units, planned collectives and bytes, optimizer groups, and the exchange
with Hugging Face, whose names it has.
"""

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from models.config import LlamaConfig

# How tensor parallelism shards a weight:
# - column: by rows of the weight, which are outputs; row: by columns, which are inputs;
# - key_value: by heads, or replicated where ranks outnumber heads, each rank using one of them;
# - vocabulary: by rows of the vocabulary, perhaps unevenly;
# - replicated: whole on every rank; with sequence parallelism each reads a part of the sequence;
# - local_heads: whole on every rank, which reads its own heads with it.
Sharding = Literal["column", "row", "key_value", "vocabulary", "replicated", "local_heads"]
Kind = Literal["matrix", "embedding", "head", "norm"]


@dataclass(frozen=True)
class Weight:
    """A parameter.

    Attributes:
        name: as in Hugging Face's files; of a block's weight, what follows ``model.layers.3.``.
        shape: of the whole parameter.
        sharding: over tensor-parallel ranks.
        kind: what it is. Norms start as ones and do not decay; all others are random matrices.
        heads: number of heads in dim 0 of a ``key_value`` weight.
        in_matmul: whether it is in a matrix product with every token.
        writes_residual: whether its product is added to the residual stream.
    """

    name: str
    shape: tuple[int, ...]
    sharding: Sharding
    kind: Kind = "matrix"
    heads: int = 1
    in_matmul: bool = True
    writes_residual: bool = False

    @property
    def module(self) -> str:
        """Name of the module that has it."""
        return self.name.removesuffix(".weight")

    @property
    def numel(self) -> int:
        """Number of its elements."""
        return math.prod(self.shape)

    def local_shape(self, tp: int) -> tuple[int, ...]:
        """Shape on the first of ``tp`` tensor-parallel ranks."""
        rows, *columns = self.shape
        if self.sharding in ("column", "vocabulary") or (
            self.sharding == "key_value" and self.heads % tp == 0
        ):
            return -(-rows // tp), *columns
        if self.sharding == "row":
            return rows, columns[0] // tp, *columns[1:]
        return self.shape

    def product_numel(self, tp: int) -> int:
        """Elements that one of ``tp`` ranks multiplies each token with."""
        local = math.prod(self.local_shape(tp))
        one_head = self.sharding == "key_value" and self.heads % tp
        return local // self.heads if one_head else local

    def has_partial_grad(self, tp: int, sequence_parallel: bool) -> bool:
        """Whether a rank's gradient is a part of a sum over ``tp`` > 1 ranks: all have the whole
        weight, and each uses it on other heads, or on another part of the sequence."""
        if self.sharding == "key_value":
            return self.heads % tp != 0
        return self.sharding == "local_heads" or (
            self.sharding == "replicated" and sequence_parallel
        )


@dataclass(frozen=True)
class Activation:
    """What a block keeps of each token for its backward.

    Attributes:
        name: what it is.
        width: elements of a token, over all tensor-parallel ranks.
        sharding: over tensor-parallel ranks: column, key_value or replicated, or "stream", of which
            a rank keeps its part of the sequence with sequence parallelism and else all.
        heads: as of :class:`Weight`.
        wide: kept in float32 or better, whatever the compute dtype.
        whole_sequence: context parallelism gathers it.
        traffic: bytes that elementwise operations read and write of each element in a forward, in
            16 bits: of a norm with its residual sum seven accesses, of queries, keys and values
            six, of each of SwiGLU's two inputs four.
    """

    name: str
    width: int
    sharding: Literal["stream", "replicated", "column", "key_value"]
    heads: int = 1
    wide: bool = False
    whole_sequence: bool = False
    traffic: int = 0

    def local_width(self, tp: int) -> int:
        """Elements of a token on a rank."""
        if self.sharding == "column":
            return self.width // tp
        if self.sharding == "key_value":
            return self.width // (tp if self.heads % tp == 0 else self.heads)
        return self.width


class _Widths(NamedTuple):
    """What of a config decides about a block."""

    hidden: int
    feed_forward: int
    head: int
    heads: int
    kv_heads: int


def _widths(config: "LlamaConfig") -> _Widths:
    heads = config.head_size, config.num_attention_heads, config.kv_heads
    return _Widths(config.hidden_size, config.intermediate_size, *heads)


def block_weights(config: "LlamaConfig") -> tuple[Weight, ...]:
    """The weights of a block, in the order of its modules."""
    return _block_weights(_widths(config))


# The planner asks for the same ones of every layout.
@lru_cache
def _block_weights(widths: _Widths) -> tuple[Weight, ...]:
    d, f, head, heads, kv_heads = widths
    q = heads * head
    norm = Weight("", (d,), "replicated", "norm", in_matmul=False)
    return (
        replace(norm, name="input_layernorm.weight"),
        Weight("self_attn.q_proj.weight", (q, d), "column"),
        Weight("self_attn.k_proj.weight", (kv_heads * head, d), "key_value", heads=kv_heads),
        Weight("self_attn.v_proj.weight", (kv_heads * head, d), "key_value", heads=kv_heads),
        Weight("self_attn.o_proj.weight", (d, q), "row", writes_residual=True),
        replace(norm, name="post_attention_layernorm.weight"),
        Weight("mlp.gate_proj.weight", (f, d), "column"),
        Weight("mlp.up_proj.weight", (f, d), "column"),
        Weight("mlp.down_proj.weight", (d, f), "row", writes_residual=True),
    )


def block_activations(config: "LlamaConfig") -> tuple[Activation, ...]:
    """What a block keeps for its backward beside its weights, without checkpointing."""
    return _block_activations(_widths(config))


@lru_cache
def _block_activations(widths: _Widths) -> tuple[Activation, ...]:
    d, f, head, h, k = widths
    return (
        *_norm_activations(d),
        Activation("input of attention", d, "replicated"),
        Activation("queries", h * head, "column", traffic=12),
        Activation("keys", k * head, "key_value", k, whole_sequence=True, traffic=12),
        Activation("values", k * head, "key_value", k, whole_sequence=True, traffic=12),
        Activation("result of attention, by heads", h * head, "column"),
        Activation("result of attention, by tokens", h * head, "column"),
        Activation("log-sum-exp of attention", h, "column", wide=True),
        *_norm_activations(d),
        Activation("input of the feed-forward", d, "replicated"),
        Activation("gate", f, "column", traffic=8),
        Activation("up", f, "column", traffic=8),
    )


def norm_activations(config: "LlamaConfig") -> tuple[Activation, ...]:
    """What a norm of the residual stream keeps."""
    return _norm_activations(config.hidden_size)


@lru_cache
def _norm_activations(hidden: int) -> tuple[Activation, ...]:
    return (
        Activation("input of a norm", hidden, "stream", traffic=14),
        Activation("inverse root of a norm", 1, "stream", wide=True),
    )


def embedding_weight(config: "LlamaConfig") -> Weight:
    """The token embedding, which is also the head where the two are tied."""
    shape, tied = (config.vocabulary, config.hidden_size), config.tie_word_embeddings
    return Weight("model.embed_tokens.weight", shape, "vocabulary", "embedding", in_matmul=tied)


def head_weights(config: "LlamaConfig") -> list[Weight]:
    """The final norm, and the head unless it is the embedding."""
    d = config.hidden_size
    norm = Weight("model.norm.weight", (d,), "replicated", "norm", in_matmul=False)
    head = Weight("lm_head.weight", (config.vocabulary, d), "vocabulary", "head")
    return [norm] if config.tie_word_embeddings else [norm, head]


def all_weights(config: "LlamaConfig") -> dict[str, Weight]:
    """Every trained parameter by its name, in order; ``config.vocab_size`` must be set."""
    table = [embedding_weight(config)]
    for layer in range(config.num_hidden_layers):
        table += [replace(w, name=f"model.layers.{layer}.{w.name}") for w in block_weights(config)]
    table += head_weights(config)
    return {weight.name: weight for weight in table}
