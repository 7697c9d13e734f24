"""The only loss: cross-entropy of a vocabulary that may be cut over the tp ranks."""

import torch
import torch.distributed as dist
from torch import Tensor

IGNORE_INDEX = -100


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
