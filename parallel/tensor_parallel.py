"""Tensor parallelism: the plan, and its styles.

Parameters become DTensors on the tp mesh, so that FSDP2, checkpoints and clipping see them;
activations stay plain local tensors. A block has one collective at each boundary, as in
Megatron-LM (Shoeybi et al. 2019; with sequence parallelism Korthikanti et al. 2022):

                      enters a region           leaves a region
    without SP        identity (bwd all-reduce) all-reduce (bwd identity)
    with SP           all-gather over S         reduce-scatter over S

where the backward of each is the mirror image of its forward. The layers call both
(:class:`models.layers.Layer`); a style says of a module what they do.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module
from torch.distributed.tensor.placement_types import Placement

from models.config import LlamaConfig
from models.decoder import Llama
from models.layers import Layer
from models.weights import Weight, block_weights, embedding_weight, head_weights

_comm = torch.ops._c10d_functional


def _all_reduce(x: Tensor, group: str) -> Tensor:
    return _comm.wait_tensor(_comm.all_reduce(x.contiguous(), "sum", group))


def _all_gather_sequence(x: Tensor, group: str, size: int) -> Tensor:
    """[B, S / size, D] -> [B, S, D]."""
    gathered = _comm.wait_tensor(_comm.all_gather_into_tensor(x.contiguous(), size, group))
    return torch.cat(gathered.chunk(size), dim=1)


def _reduce_scatter_sequence(x: Tensor, group: str, size: int) -> Tensor:
    """[B, S, D] -> [B, S / size, D]."""
    stacked = torch.cat(x.chunk(size, dim=1))
    return _comm.wait_tensor(_comm.reduce_scatter_tensor(stacked, "sum", size, group))


class _EnterRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group, size, sequence_parallel):
        ctx.args = group, size, sequence_parallel
        return _all_gather_sequence(x, group, size) if sequence_parallel else x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        group, size, sequence_parallel = ctx.args
        if sequence_parallel:
            return _reduce_scatter_sequence(grad, group, size), None, None, None
        return _all_reduce(grad, group), None, None, None


class _LeaveRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group, size, sequence_parallel):
        ctx.args = group, size, sequence_parallel
        return (
            _reduce_scatter_sequence(x, group, size) if sequence_parallel else _all_reduce(x, group)
        )

    @staticmethod
    def backward(ctx, grad):
        group, size, sequence_parallel = ctx.args
        if sequence_parallel:
            return _all_gather_sequence(grad, group, size), None, None, None
        return grad, None, None, None


def enter_region(x: Tensor, group: str, size: int, sequence_parallel: bool) -> Tensor:
    """[B, S or S / size, D] -> [B, S, D], the input of a region on every rank."""
    return _EnterRegion.apply(x, group, size, sequence_parallel)


def leave_region(x: Tensor, group: str, size: int, sequence_parallel: bool) -> Tensor:
    """[B, S, D], a part of each sum -> [B, S or S / size, D], the sums."""
    return _LeaveRegion.apply(x, group, size, sequence_parallel)


class _Style(ParallelStyle):
    """What the styles share: how the weight is placed, and what the module's output is.

    A style sets attributes of :class:`models.layers.Layer`.
    """

    def __init__(self, weight: Weight, sequence_parallel: bool):
        self.weight, self.sequence_parallel = weight, sequence_parallel

    @property
    def _stream(self) -> Placement:
        """Placement of the residual stream [B, S, D]."""
        return Shard(1) if self.sequence_parallel else Replicate()

    def _place(self, module: Layer, mesh: DeviceMesh, weight: Placement, output: Placement) -> None:
        placed = distribute_tensor(module.weight, mesh, [weight], src_data_rank=None)
        module.weight = nn.Parameter(placed)
        module.partial_grad = self.weight.has_partial_grad(mesh.size(), self.sequence_parallel)
        module.output_placement = output

    def _boundary(self, mesh: DeviceMesh, what: Callable) -> Callable[[Tensor], Tensor]:
        group = mesh.get_group().group_name
        return partial(
            what, group=group, size=mesh.size(), sequence_parallel=self.sequence_parallel
        )


class Region(_Style):
    """A module whose input enters the tensor-parallel region (attention, feed-forward)."""

    def _apply(self, module: Layer, mesh: DeviceMesh) -> Layer:
        module.enter = self._boundary(mesh, enter_region)
        module.output_placement = self._stream
        return module


class ColumnParallel(_Style):
    """A linear layer whose output rows are sharded."""

    def _apply(self, module: Layer, mesh: DeviceMesh) -> Layer:
        self._place(module, mesh, weight=Shard(0), output=Shard(2))
        module.output_start = rows_of(module.out_features, *_at(mesh)).start
        return module


class VocabParallelHead(ColumnParallel):
    """A linear layer whose output rows are sharded, and which is a region of its own."""

    def _apply(self, module: Layer, mesh: DeviceMesh) -> Layer:
        module.enter = self._boundary(mesh, enter_region)
        return super()._apply(module, mesh)


class KeyValueParallel(ColumnParallel):
    """A key or value projection, sharded by heads, or replicated where ranks outnumber heads.

    A replicated one uses the rows of the single head that this rank's query heads attend to; its
    local gradient is then a part of a sum over tp.
    """

    def _apply(self, module: Layer, mesh: DeviceMesh) -> Layer:
        (tp, tp_rank), heads = _at(mesh), self.weight.heads
        if heads % tp == 0:
            return super()._apply(module, mesh)
        self._place(module, mesh, weight=Replicate(), output=Shard(2))
        head_size = self.weight.shape[0] // heads
        first = tp_rank * heads // tp * head_size
        module.local_rows = slice(first, first + head_size)
        module.output_start = first
        module.output_counts = tp_rank % (tp // heads) == 0
        return module


class RowParallel(_Style):
    """A linear layer whose input columns are sharded; its output is summed as it leaves."""

    def _apply(self, module: Layer, mesh: DeviceMesh) -> Layer:
        self._place(module, mesh, weight=Shard(1), output=self._stream)
        module.leave = self._boundary(mesh, leave_region)
        return module


class VocabParallelEmbedding(_Style):
    """A token embedding whose vocabulary rows are sharded; its output is summed as it leaves."""

    def _apply(self, module: Layer, mesh: DeviceMesh) -> Layer:
        module.vocab_start = rows_of(module.num_embeddings, *_at(mesh)).start
        self._place(module, mesh, weight=Shard(0), output=self._stream)
        module.leave = self._boundary(mesh, leave_region)
        return module


class Replicated(_Style):
    """A module with a replicated weight, on the residual stream or on a rank's own heads."""

    def _apply(self, module: Layer, mesh: DeviceMesh) -> Layer:
        local = self.weight.sharding == "local_heads"
        self._place(module, mesh, weight=Replicate(), output=Shard(2) if local else self._stream)
        return module


def partial_modules(model: nn.Module) -> list[Layer]:
    """The modules whose weights have gradients that are parts of sums over tp."""
    return [module for module in model.modules() if getattr(module, "partial_grad", False)]


def reduce_partial_gradients(modules: list[Layer], group: dist.ProcessGroup) -> None:
    """Sum over tp the gradients of replicated weights of which every rank has computed a part.

    One all-reduce for all of them, once a step: of this rank's dp shards, in the dtype of the
    reduction over dp.

    Args:
        modules: of :func:`partial_modules`; to find them takes longer than to sum.
    """
    grads = [module.weight.grad for module in modules]
    parts = [g.to_local() if isinstance(g, DTensor) else g for g in grads if g is not None]
    if not parts:
        return
    total = torch.cat([part.flatten() for part in parts])
    dist.all_reduce(total, group=group)
    sums = total.split([part.numel() for part in parts])
    torch._foreach_copy_(parts, [s.view_as(p) for s, p in zip(sums, parts, strict=True)])


def _at(mesh: DeviceMesh) -> tuple[int, int]:
    return mesh.size(), mesh.get_local_rank()


def rows_of(rows: int, tp: int, tp_rank: int) -> slice:
    """Rows of a tp rank as of ``Shard(0)``: ``ceil(rows / tp)`` each, the last the rest."""
    per_rank = -(-rows // tp)
    first = tp_rank * per_rank
    return slice(first, min(first + per_rank, rows))


STYLES = {
    "column": ColumnParallel,
    "row": RowParallel,
    "key_value": KeyValueParallel,
    "replicated": Replicated,
    "local_heads": Replicated,
}


def tensor_parallel_plan(config: LlamaConfig, sequence_parallel: bool) -> dict[str, ParallelStyle]:
    """The plan, from the table of weights: module name (``*`` stands for every block) to style."""
    embedding, (norm, *_) = embedding_weight(config), head_weights(config)
    plan = {
        embedding.module: VocabParallelEmbedding(embedding, sequence_parallel),
        norm.module: Replicated(norm, sequence_parallel),
        # A tied one has the weight of the embedding.
        "lm_head": VocabParallelHead(embedding, sequence_parallel),
    }
    for weight in block_weights(config):
        name = f"model.layers.*.{weight.module}"
        if weight.sharding == "column":
            # What has a sharded projection in it is a region.
            plan[name.rpartition(".")[0]] = Region(weight, sequence_parallel)
        plan[name] = STYLES[weight.sharding](weight, sequence_parallel)
    return plan


def apply_tensor_parallel(model: Llama, mesh: DeviceMesh, sequence_parallel: bool) -> None:
    """Shard ``model`` over the 1-D ``mesh`` and tie its weights again.

    Args:
        sequence_parallel: shard the residual stream along the sequence between regions.
    """
    plan = tensor_parallel_plan(model.config, sequence_parallel)
    if model.lm_head is None:
        del plan["model.norm"], plan["lm_head"]
    if model.model.embed_tokens is None:
        del plan["model.embed_tokens"]
    parallelize_module(model, mesh, plan)
    model.tie_weights()
    if sequence_parallel:
        model.sequence_shards = mesh.size()
