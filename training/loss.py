"""The only loss: cross-entropy of a vocabulary that may be sharded over the tp ranks."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from training.data.batches import IGNORE_INDEX


class _VocabParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, targets, vocab_start, group):
        # [N, local V] in float32 or better; exp() below happens in place, so this is the only copy.
        x = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True)
        top = x.amax(dim=-1)
        if group is not None:
            dist.all_reduce(top, dist.ReduceOp.MAX, group)
        x -= top.unsqueeze(-1)

        row = targets - vocab_start
        mine = (row >= 0) & (row < x.shape[1])
        row = row.where(mine, 0).unsqueeze(-1)
        at_target = x.gather(-1, row).squeeze(-1) * mine
        x.exp_()
        sums = torch.stack((x.sum(dim=-1), at_target))
        if group is not None:
            dist.all_reduce(sums, dist.ReduceOp.SUM, group)
        total, at_target = sums

        valid = targets != IGNORE_INDEX
        ctx.save_for_backward(x.div_(total.unsqueeze(-1)), row, mine, valid)
        ctx.dtype = logits.dtype
        return ((total.log() - at_target) * valid).sum()

    @staticmethod
    def backward(ctx, grad):
        softmax, row, mine, valid = ctx.saved_tensors
        out = softmax.scatter_add(-1, row, -mine.to(softmax.dtype).unsqueeze(-1))
        out *= (grad * valid).unsqueeze(-1)
        return out.to(ctx.dtype), None, None, None


def cross_entropy_sum(
    logits: Tensor,
    targets: Tensor,
    *,
    vocab_start: int = 0,
    tp_group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Sum of the cross-entropy in nats over all targets that are not ``IGNORE_INDEX``.

    The sum, not a mean: whoever calls divides by the number of target tokens of the whole
    optimizer step, so that micro-batches and ranks with unequal counts need no special case.

    With ``tp_group`` each rank holds the logits of its own vocabulary rows, and the whole
    vocabulary exists nowhere: one max and one sum over tp of a number or two per token
    (Megatron-LM, Shoeybi et al. 2019). Computed in float32, or float64 for float64 logits.

    Args:
        logits: [B, S, local V].
        targets: [B, S] global token ids, or ``IGNORE_INDEX``.
        vocab_start: global id of this rank's first logit.

    Returns:
        A scalar, equal on all tp ranks.
    """
    return _VocabParallelCrossEntropy.apply(
        logits.flatten(0, 1), targets.flatten(), vocab_start, tp_group
    )


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, targets, chunks, kwargs):
        total = hidden.new_zeros((), dtype=torch.promote_types(hidden.dtype, torch.float32))
        hidden_grad, weight_grad = [], torch.zeros_like(weight, dtype=total.dtype)
        for x, t in zip(hidden.chunk(chunks, dim=1), targets.chunk(chunks, dim=1), strict=True):
            with torch.enable_grad():
                logits = F.linear(x, weight).detach().requires_grad_()
                loss = cross_entropy_sum(logits, t, **kwargs)
                (grad,) = torch.autograd.grad(loss, logits)
            total += loss.detach()
            hidden_grad.append(grad @ weight)
            weight_grad += grad.flatten(0, 1).T @ x.flatten(0, 1)
        ctx.save_for_backward(torch.cat(hidden_grad, dim=1), weight_grad.to(weight.dtype))
        return total

    @staticmethod
    def backward(ctx, grad):
        hidden_grad, weight_grad = ctx.saved_tensors
        return hidden_grad * grad, weight_grad * grad, None, None, None


def chunked_cross_entropy_sum(
    hidden: Tensor, weight: Tensor, targets: Tensor, chunks: int, **kwargs
) -> Tensor:
    """As :func:`cross_entropy_sum` of ``hidden @ weight.T``, a part of the sequence at a time.

    The logits of one part exist at once. Its gradient is formed right after its loss, so that no
    logits are computed twice; hidden states and weight keep one gradient each.

    Args:
        hidden: [B, S, D].
        weight: [local V, D].
        targets: [B, S].
        chunks: number of parts.
        kwargs: of :func:`cross_entropy_sum`.
    """
    if torch.is_grad_enabled():
        return _ChunkedCrossEntropy.apply(hidden, weight, targets, chunks, kwargs)
    parts = zip(hidden.chunk(chunks, dim=1), targets.chunk(chunks, dim=1), strict=True)
    return sum(cross_entropy_sum(F.linear(x, weight), t, **kwargs) for x, t in parts)
