"""Weight updates: the optimizer, the learning rate, the global gradient norm and clipping."""

import itertools
import operator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.optim.adamw import adamw

from models.weights import all_weights
from training.config.schema import OptimizerSection

# Moments that are stored in bfloat16 are widened this many at a time: 128 MiB in float32.
CHUNK_ELEMENTS = 2**24


def _local(tensor: Tensor) -> Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


class ShardedOptimizer:
    """Fused AdamW (Loshchilov and Hutter 2019) or plain SGD on this rank's shards.

    Both are elementwise, so the update needs no communication, and torch.optim sees plain tensors
    that share memory with the shards: DTensor dispatch over thousands of tensors would cost host
    time in each step, and not every fused kernel knows DTensors. Shards that are offloaded are
    updated on the CPU. Weight decay acts on all weights but norms. The state exists from the start,
    since a checkpoint is loaded into it in place.
    """

    def __init__(self, model: nn.Module, config: OptimizerSection):
        self.names, self.parameters = zip(*model.named_parameters(), strict=True)
        self._counted = [counts_here(p) for p in self.parameters]
        self.shards = [nn.Parameter(_local(p.detach())) for p in self.parameters]
        table = all_weights(model.config)
        self._rounded = config.optimizer_state_dtype == "bfloat16"
        norms = [table[name].kind == "norm" for name in self.names]
        matrices = itertools.compress(self.shards, map(operator.not_, norms))
        groups = [
            {"params": list(matrices), "weight_decay": config.weight_decay},
            {"params": list(itertools.compress(self.shards, norms)), "weight_decay": 0.0},
        ]
        if config.optimizer == "sgd":
            self._inner = torch.optim.SGD(groups, lr=config.lr, fused=True)
            return
        self._inner = torch.optim.AdamW(
            groups, lr=config.lr, betas=(config.beta1, config.beta2), fused=True
        )
        stored = torch.bfloat16 if self._rounded else None
        for shard in self.shards:
            self._inner.state[shard] = {
                "step": torch.zeros((), dtype=torch.float32, device=shard.device),
                "exp_avg": torch.zeros_like(shard, dtype=stored, requires_grad=False),
                "exp_avg_sq": torch.zeros_like(shard, dtype=stored, requires_grad=False),
            }

    def held_bytes(self) -> tuple[int, int]:
        """Bytes that this rank stores of the parameters, and of the optimizer's moments."""
        state = [t for s in self.shards for t in self._inner.state.get(s, {}).values()]
        moments = [t for t in state if t.ndim]
        return sum(s.nbytes for s in self.shards), sum(t.nbytes for t in moments)

    def grads(self) -> list[Tensor]:
        """This rank's gradients, in the order of the parameters."""
        return [_local(p.grad) for p in self.parameters]

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for p, shard in zip(self.parameters, self.shards, strict=True):
            p.grad = shard.grad = None

    @torch.no_grad()
    def local_sums(self, loss: Tensor) -> Tensor:
        """This rank's part of the squared global gradient norm, and its loss, for one all-reduce.

        Each parameter counts once over all ranks, however often it is replicated. Accumulated in
        float64: torch's float32 norm on the CPU is off by 1e-4 for four million elements, and by
        less for smaller shards, so that the clipped update would depend on the layout.

        Returns:
            float64 [2].
        """
        counted = list(itertools.compress(self.grads(), self._counted))
        squares = loss.new_zeros((), dtype=torch.float64)
        if counted:
            norms = torch.stack(torch._foreach_norm(counted, 2, torch.float64))
            squares = norms.square().sum().to(loss.device)
        return torch.stack((squares, loss.double()))

    @torch.no_grad()
    def clip(self, norm: Tensor, max_norm: float) -> None:
        """Scale all gradients so that their global ``norm`` is at most ``max_norm``."""
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        grads = self.grads()
        torch._foreach_mul_(grads, scale.to(grads[0]))

    def step(self, lr: float, skip: Tensor) -> None:
        """Update the weights, or change nothing where ``skip`` is 1: decided on the device.

        Args:
            skip: float32 scalar, 0 or 1. The fused kernels know it as ``found_inf``.
        """
        for shard, grad in zip(self.shards, self.grads(), strict=True):
            shard.grad = grad
        for group in self._inner.param_groups:
            group["lr"] = lr
        # A copy to the CPU waits for the device: an update there must know what it is told. torch
        # would copy without waiting, and read whatever is there.
        self._inner.found_inf = skip.to(self.shards[0].device)
        if self._rounded:
            # The fused kernels want moments of the dtype of the weights.
            self._update_in_chunks()
        else:
            self._inner.step()

    @torch.no_grad()
    def _update_in_chunks(self) -> None:
        """AdamW in the dtype of the weights; then the moments are rounded to the nearest again."""
        for group in self._inner.param_groups:
            beta1, beta2 = group["betas"]
            fixed = {name: group[name] for name in ("lr", "weight_decay", "eps")}
            for shard in group["params"]:
                state = self._inner.state[shard]
                whole = shard, shard.grad, state["exp_avg"], state["exp_avg_sq"]
                chunks = zip(*(t.view(-1).split(CHUNK_ELEMENTS) for t in whole), strict=True)
                for weight, grad, *stored in chunks:
                    first, second = (m.to(weight.dtype) for m in stored)
                    step = state["step"].clone()  # counts once for all chunks
                    adamw(
                        [weight],
                        [grad],
                        [first],
                        [second],
                        [],
                        [step],
                        **fixed,
                        beta1=beta1,
                        beta2=beta2,
                        amsgrad=False,
                        maximize=False,
                        fused=True,
                        found_inf=self._inner.found_inf,
                    )
                    torch._foreach_copy_(stored, [first, second])
                state["step"].copy_(step)

    def named_state(self) -> dict[str, Tensor]:
        """The optimizer's tensors by ``<parameter name>.<state name>``: live, laid out as the
        parameters, so that a checkpoint can be resharded."""
        state = {}
        for name, p, shard in zip(self.names, self.parameters, self.shards, strict=True):
            for key, value in self._inner.state.get(shard, {}).items():
                if isinstance(p, DTensor) and value.ndim == p.ndim:
                    # Not from_local(): of offloaded state it would make a copy on the GPU.
                    meta = TensorMeta(p.shape, p.stride(), value.dtype)
                    spec = DTensorSpec(p.device_mesh, p.placements, tensor_meta=meta)
                    value = DTensor(value, spec, requires_grad=False)
                state[f"{name}.{key}"] = value
        return state


def counts_here(p: Tensor) -> bool:
    """Whether this rank's part of a parameter counts in a sum over all ranks.

    Of ranks that hold the same part, only the first in each dim of replication does. A plain
    tensor is whole on every rank.
    """
    if not isinstance(p, DTensor):
        return not dist.is_initialized() or dist.get_rank() == 0
    return all(
        at == 0
        for at, placement in zip(p.device_mesh.get_coordinate(), p.placements, strict=True)
        if placement.is_replicate()
    )
