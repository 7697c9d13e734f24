"""Tensor parallelism: the plan, and its styles.

Parameters become DTensors on the tp mesh, so that FSDP2, checkpoints and clipping see them;
activations stay plain local tensors. A block has one collective at each boundary, as in
Megatron-LM (Shoeybi et al. 2019; with sequence parallelism Korthikanti et al. 2022):

                      enters a region           leaves a region
    without SP        identity (bwd all-reduce) all-reduce (bwd identity)
    with SP           all-gather over S         reduce-scatter over S

where the backward of each is the mirror image of its forward.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module
from torch.distributed.tensor.placement_types import Placement

from models.config import LlamaConfig
from models.decoder import Llama

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


class _Style(ParallelStyle):
    """What the styles share: how the weight is placed, and what the module's output is.

    Sets on the module ``partial_grad`` (whether the local gradient of a replicated weight is a part
    of a sum over tp, left to :func:`reduce_partial_gradients`) and ``output_placement`` (how the
    ranks' outputs form the global one); where that is a shard of the last dim, ``output_start`` is
    the global index of this rank's first column, and ``output_counts`` is False if another rank has
    the same columns.
    """

    def __init__(self, sequence_parallel: bool):
        self.sequence_parallel = sequence_parallel

    @property
    def _stream(self) -> Placement:
        """Placement of the residual stream [B, S, D]."""
        return Shard(1) if self.sequence_parallel else Replicate()

    def _place(
        self,
        module: nn.Module,
        mesh: DeviceMesh,
        weight: Placement,
        output: Placement,
        partial_grad: bool = False,
    ) -> None:
        placed = distribute_tensor(module.weight, mesh, [weight], src_data_rank=None)
        module.weight = nn.Parameter(placed)
        module.partial_grad = partial_grad
        module.output_placement = output

    def _boundary(self, mesh: DeviceMesh) -> tuple[str, int, bool]:
        return mesh.get_group().group_name, mesh.size(), self.sequence_parallel

    def _enter(self, module: nn.Module, mesh: DeviceMesh) -> None:
        args = self._boundary(mesh)
        module.register_forward_pre_hook(
            lambda _, inputs: (_EnterRegion.apply(inputs[0], *args), *inputs[1:])
        )

    def _leave(self, module: nn.Module, mesh: DeviceMesh) -> None:
        args = self._boundary(mesh)
        module.register_forward_hook(lambda _, __, output: _LeaveRegion.apply(output, *args))


class Region(_Style):
    """A module whose input enters the tensor-parallel region (attention, feed-forward)."""

    def _apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        self._enter(module, mesh)
        module.output_placement = self._stream
        return module


class ColumnParallel(_Style):
    """A linear layer cut by output rows; ``head`` is one that is also a region of its own."""

    def __init__(self, sequence_parallel: bool, head: bool = False):
        super().__init__(sequence_parallel)
        self.head = head

    def _apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        self._place(module, mesh, weight=Shard(0), output=Shard(2))
        module.output_start = rows_of(module.out_features, *_at(mesh)).start
        if self.head:
            self._enter(module, mesh)
        return module


class KeyValueParallel(_Style):
    """A key or value projection, cut by heads, or replicated where ranks outnumber heads.

    A replicated one uses the rows of the single head that this rank's query heads attend to; its
    local gradient is then a part of a sum over tp.
    """

    def __init__(self, sequence_parallel: bool, kv_heads: int, head_size: int):
        super().__init__(sequence_parallel)
        self.kv_heads, self.head_size = kv_heads, head_size

    def _apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        if self.kv_heads % mesh.size() == 0:
            return ColumnParallel(self.sequence_parallel)._apply(module, mesh)
        self._place(module, mesh, weight=Replicate(), output=Shard(2), partial_grad=True)
        tp, tp_rank = _at(mesh)
        first = tp_rank * self.kv_heads // tp * self.head_size
        module.local_rows = slice(first, first + self.head_size)
        module.output_start = first
        module.output_counts = tp_rank % (tp // self.kv_heads) == 0
        return module


class RowParallel(_Style):
    """A linear layer cut by input columns; its output is summed as it leaves the region."""

    def _apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        self._place(module, mesh, weight=Shard(1), output=self._stream)
        self._leave(module, mesh)
        return module


class VocabParallelEmbedding(_Style):
    """A token embedding cut by vocabulary rows; its output is summed as it leaves."""

    def _apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        module.vocab_start = rows_of(module.num_embeddings, *_at(mesh)).start
        self._place(module, mesh, weight=Shard(0), output=self._stream)
        self._leave(module, mesh)
        return module


class Norm(_Style):
    """A norm with a replicated weight.

    Under sequence parallelism each rank sees a slice of the sequence, so that its gradient is a
    part of a sum over tp.
    """

    def _apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        self._place(
            module,
            mesh,
            weight=Replicate(),
            output=self._stream,
            partial_grad=self.sequence_parallel,
        )
        return module


def reduce_partial_gradients(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Sum over tp the gradients of replicated weights of which every rank has computed a part.

    One all-reduce for all of them, once a step: of this rank's dp shards, in the dtype of the
    reduction over dp.
    """
    if not hasattr(model, "partial_modules"):
        # Once: to walk through all modules takes longer than the rest of this function.
        found = [m for m in model.modules() if getattr(m, "partial_grad", False)]
        model.partial_modules = found
    grads = [module.weight.grad for module in model.partial_modules]
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
    """Rows of a tp rank as ``Shard(0)`` cuts: ``ceil(rows / tp)`` each, the last what is left."""
    per_rank = -(-rows // tp)
    first = tp_rank * per_rank
    return slice(first, min(first + per_rank, rows))


def tensor_parallel_plan(config: LlamaConfig, sequence_parallel: bool) -> dict[str, ParallelStyle]:
    """The plan: module name (``*`` stands for every block) to style."""
    sp = sequence_parallel
    key_value = KeyValueParallel(sp, config.kv_heads, config.head_size)
    return {
        "model.embed_tokens": VocabParallelEmbedding(sp),
        "model.layers.*.input_layernorm": Norm(sp),
        "model.layers.*.self_attn": Region(sp),
        "model.layers.*.self_attn.q_proj": ColumnParallel(sp),
        "model.layers.*.self_attn.k_proj": key_value,
        "model.layers.*.self_attn.v_proj": key_value,
        "model.layers.*.self_attn.o_proj": RowParallel(sp),
        "model.layers.*.post_attention_layernorm": Norm(sp),
        "model.layers.*.mlp": Region(sp),
        "model.layers.*.mlp.gate_proj": ColumnParallel(sp),
        "model.layers.*.mlp.up_proj": ColumnParallel(sp),
        "model.layers.*.mlp.down_proj": RowParallel(sp),
        "model.norm": Norm(sp),
        "lm_head": ColumnParallel(sp, head=True),
    }


def apply_tensor_parallel(model: Llama, mesh: DeviceMesh, sequence_parallel: bool) -> None:
    """Cut ``model`` over the 1-D ``mesh`` and tie its weights again.

    Args:
        sequence_parallel: cut the residual stream along the sequence between regions.
    """
    plan = tensor_parallel_plan(model.config, sequence_parallel)
    if model.lm_head is None:
        del plan["model.norm"], plan["lm_head"]
    if model.model.embed_tokens is None:
        del plan["model.embed_tokens"]
    parallelize_module(model, mesh, plan)
    model.tie_weights()
    if sequence_parallel:
        model.model.sequence_shards = mesh.size()
