"""One optimizer step: forward and backward of all micro-batches, then the update."""

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.profiler import record_function

from models.layers import Layer
from parallel.data_parallel import begin_micro_batch
from parallel.layout import Layout
from parallel.mesh import Ranks
from parallel.tensor_parallel import partial_modules, reduce_partial_gradients, rows_of
from training.loss import chunked_cross_entropy_sum, cross_entropy_sum
from training.optimizers.sharded import ShardedOptimizer
from training.run.outcome import NonFiniteError

if TYPE_CHECKING:
    from parallel.pipeline import Pipeline

Batch = list[tuple[Tensor, Tensor]]


class FaultFlag:
    """Remembers on the device the first step whose loss or gradient norm was not finite."""

    def __init__(self, device: torch.device):
        self.step = torch.zeros((), dtype=torch.float64, device=device)
        self._here = torch.zeros((), dtype=torch.int64, device=device)

    def record(self, step: int, sums: Tensor, local: Tensor) -> Tensor:
        """Note ``step`` if the global ``sums`` are not finite, and return 1.0 then, else 0.0.

        Args:
            local: this rank's own [squared gradient norm, loss].
        """
        bad = ~sums.isfinite().all()
        first = bad & (self.step == 0)
        squares_bad, loss_bad = ~local.isfinite()
        self._here = torch.where(first, torch.where(loss_bad, 2, squares_bad.long()), self._here)
        self.step = torch.where(first, float(step), self.step)
        return bad.float()

    def check(self, ranks: Ranks, step: int | None = None) -> None:
        """Raise :class:`NonFiniteError` on all ranks if a step was noted.

        Args:
            step: ``self.step``, where the caller has read it already; else the device is read.
        """
        step = int(self.step) if step is None else step
        if not step:
            return
        codes = torch.zeros(dist.get_world_size(ranks.control), dtype=torch.int64)
        codes[ranks.rank] = self._here.cpu()
        dist.all_reduce(codes, group=ranks.control)
        # A loss that is not finite spreads to every gradient: where there is one, it is the cause.
        worst = int(codes.max())
        where = [rank for rank, code in enumerate(codes.tolist()) if code == worst]
        raise NonFiniteError(step, where, "the loss" if worst == 2 else "the gradient")


@dataclass(frozen=True)
class Engine:
    """What a step works with.

    Attributes:
        model: what is called with a micro-batch: the model, or a wrapper that compresses gradients.
        pipeline: runs the micro-batches instead, where the model is split into stages.
    """

    model: nn.Module
    optimizer: ShardedOptimizer
    layout: Layout
    ranks: Ranks
    pipeline: "Pipeline | None" = None

    @cached_property
    def partial_grad_modules(self) -> list[Layer]:
        """Modules whose gradients are parts of sums over tp."""
        return partial_modules(self.model)

    @cached_property
    def fault(self) -> FaultFlag:
        """Notes the first step that is not finite."""
        return FaultFlag(self.ranks.device)


def batch_loss(model: nn.Module, inputs: Tensor, targets: Tensor, ranks: Ranks) -> Tensor:
    """Summed loss in nats of one micro-batch [B, S]; equal on all tp ranks."""
    rows = rows_of(model.config.vocab_size, ranks.tp, ranks.tp_rank)
    mine = {"vocab_start": rows.start, "tp_group": ranks.tp_group}
    chunks = model.lm_head.loss_chunks
    if chunks == 1:
        return cross_entropy_sum(model(inputs), targets, **mine)
    return model(inputs, lambda x, w: chunked_cross_entropy_sum(x, w, targets, chunks, **mine))


def forward_backward(engine: Engine, batch: Batch, target_tokens: int) -> Tensor:
    """Accumulate the gradient of the global mean loss over this rank's micro-batches.

    Args:
        batch: this dp rank's micro-batches.
        target_tokens: targets of the whole optimizer step, over all ranks and micro-batches.

    Returns:
        float64 scalar: this dp rank's share of the global mean loss; zero on all pp ranks but one.
    """
    ranks = engine.ranks
    share = torch.zeros((), dtype=torch.float64, device=ranks.device)
    micro_batches = () if engine.pipeline else batch
    if engine.pipeline:
        share = engine.pipeline.forward_backward(batch, target_tokens)
    for number, (inputs, targets) in enumerate(micro_batches, start=1):
        begin_micro_batch(engine.model, zero=engine.layout.zero, last=number == len(batch))
        with record_function("forward"):
            loss = batch_loss(engine.model, inputs, targets, ranks) / target_tokens
        with record_function("backward"):
            loss.backward()
        share += loss.detach()
    if ranks.tp_group:
        reduce_partial_gradients(engine.partial_grad_modules, ranks.tp_group)
    return share


@dataclass(frozen=True)
class StepResult:
    """Device scalars of one step: nothing here has been read by the host."""

    loss: Tensor
    grad_norm: Tensor


def update(engine: Engine, share: Tensor, *, step: int, lr: float, grad_clip: float) -> StepResult:
    """Global norm, clip, and update of the weights. The host does not wait for the device here,
    unless weights are offloaded.

    Args:
        share: of :func:`forward_backward`.
        grad_clip: largest global norm; 0 turns clipping off.
    """
    optimizer = engine.optimizer
    with record_function("gradient norm"):
        local = optimizer.local_sums(share)
        sums = local.clone()
        if engine.ranks.tp_rank != 0:
            # All tp ranks of a dp rank have the same loss; one of them counts.
            sums[1] = 0
        dist.all_reduce(sums)
        norm = sums[0].sqrt()
        skip = engine.fault.record(step, sums, local)
        if grad_clip:
            optimizer.clip(norm, grad_clip)
    with record_function("update"):
        optimizer.step(lr, skip)
        optimizer.zero_grad()
    return StepResult(loss=sums[1], grad_norm=norm)
