"""What a rank holds and sends, measured: bytes of storages and collectives, as they happen.

Works on real tensors, and on fake ones, which have shapes and no memory.
"""

import collections
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from parallel.data_parallel import fsdp_units
from training.optimizers.sharded import ShardedOptimizer

# By a part of the operation's name.
KINDS = {"allgather": "all_gather", "allreduce": "all_reduce"}
KINDS |= {kind: kind for kind in ("all_gather", "reduce_scatter", "all_reduce", "send", "recv")}
# Loss and squared gradient norm of a step, summed over all ranks in float64.
STEP_SUMS = ("all_reduce", 16)


class CountCollectives(TorchDispatchMode):
    """Counts collectives: ``counts[group name, kind, bytes of the whole tensor]``."""

    def __init__(self):
        super().__init__()
        self.counts = collections.Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented  # and what it does with its local tensors comes here
        out = func(*args, **(kwargs or {}))
        space, _, name = func._schema.name.partition("::")
        if space in ("c10d", "_c10d_functional"):
            kind = next((v for k, v in KINDS.items() if k in name), None)
            if kind:
                leaves = torch.utils._pytree.tree_leaves((args, out))
                tensors = [t for t in leaves if isinstance(t, Tensor)]
                size = max(t.numel() * t.element_size() for t in tensors)
                self.counts[_group(func, args), kind, size] += 1
        return out

    def by_dim(self, mesh: DeviceMesh) -> collections.Counter:
        """The same with the mesh dim, or "all", in place of the group."""
        names = {mesh.get_group(dim).group_name: dim for dim in mesh.mesh_dim_names}
        world = dist.group.WORLD.group_name
        counts = collections.Counter()
        for (group, kind, size), number in self.counts.items():
            # Only the flattened dim of FSDP is none of the mesh. A dim over all ranks has no group
            # of its own: what is sent tells the two apart.
            all_ranks = group == world and (kind, size) == STEP_SUMS
            counts["all" if all_ranks else names.get(group, "dp x cp"), kind, size] += number
        return counts


def _group(func, args: tuple) -> str:
    for value, argument in zip(args, func._schema.arguments, strict=False):
        if argument.name == "group_name":
            return value
        if argument.name == "process_group":
            return dist.ProcessGroup.unbox(value).group_name
    raise ValueError(f"{func} names no group")


def local_bytes(tensor: Tensor) -> int:
    """Bytes of the elements of a tensor on this rank."""
    local = getattr(tensor, "_local_tensor", tensor)
    return local.numel() * local.element_size()


@dataclass(frozen=True)
class Stored:
    """Bytes that a rank holds at a moment.

    Attributes:
        parameters: shards of the parameters.
        gathered: of the parameters that are gathered.
        gradients: shards of the gradients.
        whole_gradients: gradients that are not sharded.
        optimizer: moments.
    """

    parameters: int
    gathered: int
    gradients: int
    whole_gradients: int
    optimizer: int


def _fsdp_params(model: nn.Module) -> Iterator:
    groups = (unit._get_fsdp_state()._fsdp_param_group for unit in fsdp_units(model))
    for group in dict.fromkeys(filter(None, groups)):  # norm and head are one
        yield from group.fsdp_params


def stored(model: nn.Module, optimizer: ShardedOptimizer) -> Stored:
    """What this rank holds now of parameters, gradients and optimizer state."""
    parameters = gathered = gradients = whole = 0
    sharded = list(_fsdp_params(model))
    if not sharded:  # one dp rank, which has nothing to shard
        parameters = sum(map(local_bytes, model.parameters()))
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        gradients = sum(map(local_bytes, grads))
    for p in sharded:
        parameters += local_bytes(p.sharded_param)
        gathered += sum(t.untyped_storage().nbytes() for t in p.all_gather_outputs)
        if (shard := p.sharded_param.grad) is not None:
            gradients += local_bytes(shard)
        unsharded = getattr(p, "_unsharded_param", None)
        for grad in (p.unsharded_accumulated_grad, getattr(unsharded, "grad", None)):
            whole += 0 if grad is None else local_bytes(grad)
    states = [t for t in optimizer.named_state().values() if t.ndim]
    return Stored(parameters, gathered, gradients, whole, sum(map(local_bytes, states)))


def gathered_parameters(model: nn.Module) -> list[Tensor]:
    """Where FSDP2 holds gathered parameters, when it does."""
    return [t for p in _fsdp_params(model) for t in p.all_gather_outputs]


class LiveBytes(TorchDispatchMode):
    """Bytes of all storages that were made under it and are still alive; and their largest.

    Attributes:
        now: bytes at this moment.
        peak: the largest ``now`` so far.
        vocabulary: of :attr:`largest_vocabulary`.
        largest_vocabulary: most elements of a tensor whose last dim is ``vocabulary``.
    """

    vocabulary = 0

    def __init__(self):
        super().__init__()
        self.now = self.peak = self.largest_vocabulary = 0
        self._alive = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented  # and what it does with its local tensors comes here
        out = func(*args, **(kwargs or {}))
        given = _storages(torch.utils._pytree.tree_leaves((args, kwargs)))
        for t in torch.utils._pytree.tree_leaves(out):
            if type(t) in (Tensor, FakeTensor):
                storage = t.untyped_storage()
                # A view of what has been there before is not made here.
                if storage._cdata not in self._alive and storage._cdata not in given:
                    self._alive[storage._cdata] = size = storage.nbytes()
                    self.now += size
                    self.peak = max(self.peak, self.now)
                    weakref.finalize(storage, self._gone, storage._cdata)
                if t.shape[-1:] == (self.vocabulary,):
                    self.largest_vocabulary = max(self.largest_vocabulary, t.numel())
        return out

    def now_without(self, tensors: Iterable[Tensor]) -> int:
        """``now`` without the storages of some tensors."""
        return self.now - sum(self._alive.get(key, 0) for key in _storages(tensors))

    def _gone(self, key: int) -> None:
        self.now -= self._alive.pop(key)


def _storages(tensors: Iterable) -> set[int]:
    return {t.untyped_storage()._cdata for t in tensors if type(t) in (Tensor, FakeTensor)}
