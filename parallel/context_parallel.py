"""Context parallelism: a rank holds two slices of every sequence, and attends to their prefixes.

A sequence is split into 2 cp chunks, and rank r holds chunks r and 2 cp - 1 - r: the later a chunk,
the more it attends to, so that all ranks have equal work. Keys and values are gathered, and each
chunk attends to its prefix with a lower-right causal mask, which flash kernels know: no mask of
S x S exists. Source: "The Llama 3 Herd of Models" (2024), section 3.3.2.
"""

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention.bias import CausalBias, causal_lower_right
from torch.utils._python_dispatch import _disable_current_modes

from models.decoder import Llama

_comm = torch.ops._c10d_functional


def local_positions(length: int, cp: int, cp_rank: int) -> Tensor:
    """Global positions [length] of the tokens of a sequence that a rank holds, int64."""
    chunk = length // 2
    late = (2 * cp - 1 - cp_rank) * chunk
    return torch.cat(
        (
            torch.arange(cp_rank * chunk, (cp_rank + 1) * chunk),
            torch.arange(late, late + chunk),
        )
    )


def local_tokens(tokens: Tensor, cp: int, cp_rank: int) -> Tensor:
    """The part [B, S / cp] of some sequences [B, S] that a rank holds."""
    if cp == 1:
        return tokens
    return tokens[:, local_positions(tokens.shape[1] // cp, cp, cp_rank)]


class _GatherSequence(torch.autograd.Function):
    """[..., S / cp, head_dim] of each rank -> [..., S, head_dim] in the order of the sequence."""

    @staticmethod
    def forward(ctx, x, group, cp):
        ctx.args = group, cp
        parts = _comm.wait_tensor(_comm.all_gather_into_tensor(x.contiguous(), cp, group)).chunk(cp)
        early, late = zip(*(part.chunk(2, dim=-2) for part in parts), strict=True)
        return torch.cat((*early, *reversed(late)), dim=-2)

    @staticmethod
    def backward(ctx, grad):
        group, cp = ctx.args
        chunks = grad.chunk(2 * cp, dim=-2)
        parts = [torch.cat((chunks[r], chunks[-1 - r]), dim=-2) for r in range(cp)]
        summed = _comm.reduce_scatter_tensor(torch.cat(parts), "sum", cp, group)
        return _comm.wait_tensor(summed), None, None


@functools.cache
def _mask(queries: int, keys: int) -> CausalBias:
    """The last ``queries`` of ``keys`` positions, each attending to itself and what is before."""
    # No mode that watches operations may see one being made: it is a tensor of a class of its own.
    with _disable_current_modes():
        return causal_lower_right(queries, keys)


# torch.compile cannot look into the making of a mask, but into what the mask then does.
@torch.compiler.allow_in_graph
def _attend_to_prefix(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    mask = _mask(q.shape[2], k.shape[2])
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cp_rank: int,
    cp: int,
    group: str,
    attention: Callable[[Tensor, Tensor, Tensor], Tensor] = _attend_to_prefix,
) -> Tensor:
    """[B, heads, S / cp, head_dim] each -> [B, query heads, S / cp, head_dim]."""
    k, v = _GatherSequence.apply(torch.stack((k, v)), group, cp).unbind()
    chunk, outputs = q.shape[2] // 2, []
    for number, part in zip((cp_rank, 2 * cp - 1 - cp_rank), q.chunk(2, dim=2), strict=True):
        end = (number + 1) * chunk
        outputs.append(attention(part, k[:, :, :end], v[:, :, :end]))
    return torch.cat(outputs, dim=2)


def apply_context_parallel(model: Llama, mesh: DeviceMesh) -> None:
    """Make ``model`` take :func:`local_tokens` of its inputs over the 1-D ``mesh``."""
    at = {"cp": mesh.size(), "cp_rank": mesh.get_local_rank()}
    model.positions = functools.partial(local_positions, **at)
    for block in model.model.layers.values():
        attend = functools.partial(_attend, **at, group=mesh.get_group().group_name)
        block.self_attn.attend = attend
