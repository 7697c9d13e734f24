"""The layers of a decoder. They hold no mesh: ``parallel/`` tells them of it (:class:`Layer`)."""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from models.config import LlamaConfig


class _LocalWeight(torch.autograd.Function):
    """``DTensor.to_local()`` in a fraction of its time.

    The gradient gets the placement of the weight. Where a rank has only a part of a sum
    (``Layer.partial_grad``) that is not yet true, until ``reduce_partial_gradients`` sums it.
    """

    @staticmethod
    def forward(ctx, weight):
        ctx.spec = weight._spec
        return weight._local_tensor.view_as(weight._local_tensor)

    @staticmethod
    def backward(ctx, grad):
        return DTensor(grad.contiguous(), ctx.spec, requires_grad=False)


def identity(x: Tensor) -> Tensor:
    """``x`` itself: a boundary at which nothing is sent."""
    return x


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Grouped-query attention of [B, heads, S, head_dim] each, causal."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


class Layer(nn.Module):
    """A module, with all that ``parallel/`` tells modules of the layout; the defaults are those of
    one process.

    Attributes:
        enter: brings the input into the tensor-parallel region that begins here: a copy whose
            backward is an all-reduce, or with sequence parallelism an all-gather over S.
        leave: brings the output out of the region that ends here: an all-reduce, or with sequence
            parallelism a reduce-scatter over S.
        local_rows: of a replicated weight, the rows that this rank multiplies with; None: all.
        vocab_start: first vocabulary row of this rank; None: it has every row.
        compute_dtype: to which a plain weight is cast before its use; None: as it is stored.
        partial_grad: the gradient of the replicated weight is a part of a sum over tp.
        output_placement: of the fingerprints alone, as the next two: how the outputs of the tp
            ranks form the whole; None: each is whole.
        output_start: global index of the first column of the output.
        output_counts: False where another tp rank has the same columns.
        attend: attention of queries, keys and values [B, heads, S, head_dim] each.
        run: computes a block in another way, as activation checkpointing and compilation do; None:
            as written.
        positions: global positions of the tokens that a rank has of a sequence, from their number.
        sequence_shards: ranks over which sequence parallelism shards the residual stream.
        loss_chunks: parts of the sequence whose logits exist at a time, where a loss is given.
    """

    enter: Callable[[Tensor], Tensor] = staticmethod(identity)
    leave: Callable[[Tensor], Tensor] = staticmethod(identity)
    local_rows: slice | None = None
    vocab_start: int | None = None
    compute_dtype: torch.dtype | None = None
    partial_grad: bool = False
    output_placement: Placement | None = None
    output_start: int = 0
    output_counts: bool = True
    attend: Callable[[Tensor, Tensor, Tensor], Tensor] = staticmethod(causal_attention)
    run: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None
    positions: Callable[[int], Tensor] = staticmethod(torch.arange)
    sequence_shards: int = 1
    loss_chunks: int = 1


def local_weight(layer: Layer) -> Tensor:
    """The part of ``layer.weight`` this rank multiplies with, as a plain tensor."""
    weight = layer.weight
    if not isinstance(weight, DTensor):
        return weight if layer.compute_dtype is None else weight.to(layer.compute_dtype)
    # The compiler knows to_local(), and pays nothing for it.
    weight = weight.to_local() if torch.compiler.is_compiling() else _LocalWeight.apply(weight)
    return weight if layer.local_rows is None else weight[layer.local_rows]


class Linear(Layer, nn.Linear):
    """A matrix product without bias, by the local weight."""

    def __init__(self, in_features: int, out_features: int):
        super().__init__(in_features, out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., local out]."""
        return F.linear(x, local_weight(self))


class RowLinear(Linear):
    """A matrix product at the end of a region: every rank has a part of each sum."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., local in] -> [..., out]."""
        return self.leave(F.linear(x, local_weight(self)))


class Head(Linear):
    """The output head, a region of its own."""

    def forward(self, x: Tensor, loss: Callable[[Tensor, Tensor], Tensor] | None = None) -> Tensor:
        """[B, S, D] -> logits [B, S, local V], or ``loss`` of x and the local weight."""
        x = self.enter(x)
        return super().forward(x) if loss is None else loss(x, local_weight(self))


class Embedding(Layer, nn.Embedding):
    """Token embedding. A rank that has a part of the vocabulary adds zeros for other tokens."""

    def forward(self, tokens: Tensor) -> Tensor:
        """[B, S] -> [B, S, D]."""
        weight = local_weight(self)
        if self.vocab_start is None:
            return F.embedding(tokens, weight)
        row = tokens - self.vocab_start
        mine = (row >= 0) & (row < weight.shape[0])
        return self.leave(F.embedding(row.where(mine, 0), weight) * mine.unsqueeze(-1))


class _RMSNorm(torch.autograd.Function):
    """Of x [N, D], what ``F.rms_norm`` is on CUDA: one function that keeps its input and 1/rms.

    On a CPU torch puts it together from differentiable parts, which takes three times as long and
    keeps the normalised input, too.
    """

    @staticmethod
    def forward(ctx, x, weight, eps):
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        square = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square()
        rstd = square.div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, rstd)
        return (wide * rstd).mul_(weight).to(x.dtype)

    @staticmethod
    def backward(ctx, grad):
        x, weight, rstd = ctx.saved_tensors
        dtype = rstd.dtype
        wide, scale, grad = x.to(dtype), weight.to(dtype), grad.to(dtype)
        product = grad * wide
        weight_grad = torch.mv(product.T, rstd.squeeze(-1))
        along = torch.mv(product, scale).unsqueeze(-1) * rstd.pow(3) / -x.shape[-1]
        x_grad = torch.mul(grad, rstd, out=product).mul_(scale).addcmul_(wide, along)
        return x_grad.to(x.dtype), weight_grad.to(weight.dtype), None


class RMSNorm(Layer):
    """x / rms(x) * weight, computed in float32 (float64 for float64 input) and rounded once."""

    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., D]."""
        weight = local_weight(self)
        if x.device.type != "cpu":
            return F.rms_norm(x, x.shape[-1:], weight, self.eps)
        return _RMSNorm.apply(x.flatten(0, -2), weight, self.eps).view_as(x)


def rope_frequencies(config: LlamaConfig) -> Tensor:
    """Rotary frequencies in radians per position: float64 [head_dim / 2].

    Source: RoFormer (Su et al. 2021), with Llama 3.1's scaling: a wavelength longer than
    ``original / low_freq_factor`` is stretched by ``factor``, one shorter than
    ``original / high_freq_factor`` is kept, and those between are blended.
    """
    exponent = torch.arange(0, config.head_size, 2, dtype=torch.float64) / config.head_size
    frequency = config.rope_theta**-exponent
    scaling = config.rope_scaling
    if scaling is None:
        return frequency
    turns = scaling.original_max_position_embeddings * frequency / (2 * math.pi)
    keep = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    keep = keep.clamp(0, 1)
    return (1 - keep) * frequency / scaling.factor + keep * frequency


def rope_tables(
    config: LlamaConfig, positions: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Cosine and sine of the rotary angles at ``positions`` [S], each [S, head_dim / 2].

    The angles are float64, because a float32 angle of thousands of radians is off by 1e-4; the
    result is rounded once, to ``dtype``.
    """
    angles = positions.double().outer(rope_frequencies(config))
    return angles.cos().to(dtype), angles.sin().to(dtype)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate [B, heads, S, head_dim] in half-split order, in the precision of the tables."""
    first, second = x.to(cos.dtype).chunk(2, dim=-1)
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return rotated.to(x.dtype)


class Attention(Layer):
    """Causal grouped-query attention."""

    def __init__(self, config: LlamaConfig):
        super().__init__()
        head = config.head_size
        self.head_size = head
        self.q_proj = Linear(config.hidden_size, config.num_attention_heads * head)
        self.k_proj = Linear(config.hidden_size, config.kv_heads * head)
        self.v_proj = Linear(config.hidden_size, config.kv_heads * head)
        self.o_proj = RowLinear(config.num_attention_heads * head, config.hidden_size)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[B, S, D] -> [B, S, D]; tables [S, head_dim / 2]."""
        x = self.enter(x)
        batch, seq, _ = x.shape
        q, k, v = (
            proj(x).view(batch, seq, -1, self.head_size).transpose(1, 2)  # [B, local heads, S, hd]
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)
        out = self.attend(q, k, v)
        return self.o_proj(out.transpose(1, 2).reshape(batch, seq, -1))


class _SwiGLULinear(torch.autograd.Function):
    """(silu(gate) * up) @ weight.T, keeping gate and up alone.

    Left to autograd, silu(gate) and the product are kept, too: twice as much, and about a third of
    what a block keeps. To form both again costs two passes over memory, but no matrix product.
    """

    @staticmethod
    def forward(ctx, gate, up, weight):
        ctx.save_for_backward(gate, up, weight)
        return F.linear(F.silu(gate) * up, weight)

    @staticmethod
    def backward(ctx, grad):
        gate, up, weight = ctx.saved_tensors
        act, grad = F.silu(gate), grad.flatten(0, -2)
        weight_grad = grad.T @ (act * up).flatten(0, -2)
        # In place: a step needs the most memory about here, where its backward begins.
        inner_grad = (grad @ weight).view_as(gate)
        up_grad = act.mul_(inner_grad)
        return torch.ops.aten.silu_backward(inner_grad.mul_(up), gate), up_grad, weight_grad


class Down(RowLinear):
    """The projection that ends a SwiGLU feed-forward."""

    def forward(self, gate: Tensor, up: Tensor) -> Tensor:
        """[..., local F] each -> [..., D]."""
        return self.leave(_SwiGLULinear.apply(gate, up, local_weight(self)))


class MLP(Layer):
    """SwiGLU feed-forward (Shazeer 2020)."""

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.gate_proj = Linear(config.hidden_size, config.intermediate_size)
        self.up_proj = Linear(config.hidden_size, config.intermediate_size)
        self.down_proj = Down(config.intermediate_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, D] -> [B, S, D]."""
        x = self.enter(x)
        return self.down_proj(self.gate_proj(x), self.up_proj(x))
