"""Data parallelism with sharded parameters: FSDP2."""

from functools import partial

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from models.decoder import Llama


def apply_fsdp(
    model: Llama,
    mesh: DeviceMesh,
    *,
    zero: int,
    dtype: torch.dtype,
    cpu_offload: bool = False,
) -> None:
    """Shard ``model`` over the dp ``mesh``.

    One rank has nothing to shard. FSDP2 is applied there where it casts or offloads; else it would
    only copy, and parameters are just placed on the mesh.

    One unit per transformer block, one for the token embedding, one for final norm and head. Tied
    embeddings belong to the root, since a parameter can live in one unit only.

    Args:
        mesh: of the dim dp, or of dp_replicate and dp: shards are equal over the first.
        zero: 3 frees the gathered parameters after the forward, less keeps those that the backward
            reads until then. The rest of its meaning is in :func:`begin_micro_batch`.
        dtype: compute dtype; gradients are reduced in float32, or in float64 with float64.
        cpu_offload: shards and their gradients are on the CPU, where ``model`` must then be
            materialised; after a backward the gradients have arrived.
    """
    low_precision = dtype if dtype == torch.bfloat16 else None
    if mesh.size() == 1 and not low_precision and not cpu_offload:
        return _place(model, mesh)
    shard = partial(
        fully_shard,
        mesh=mesh,
        # Inputs are not cast: the RoPE tables would lose their float32.
        mp_policy=MixedPrecisionPolicy(
            param_dtype=low_precision,
            reduce_dtype=torch.float32 if low_precision else None,
            cast_forward_inputs=False,
        ),
        # A CPU as the device, in tests, has nothing to pin memory for.
        offload_policy=CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu")
        if cpu_offload
        else OffloadPolicy(),
        shard_placement_fn=lambda p: Shard(1) if _unevenly_sharded_by_tp(p) else None,
    )
    for block in model.model.layers.values():
        shard(block, reshard_after_forward=zero == 3)
    embedding, norm, head = model.model.embed_tokens, model.model.norm, model.lm_head
    if not model.config.tie_word_embeddings:
        if embedding is not None:
            # The backward of a lookup does not read the table.
            shard(embedding, reshard_after_forward=zero >= 2)
            embedding.set_unshard_in_backward(False)
        if head is not None:
            # The backward starts with these two, so freeing them would only gather them again.
            shard([norm, head], reshard_after_forward=False)
    shard(model, reshard_after_forward=False)

    for unit in fsdp_units(model):
        # The loss is already divided by the global number of target tokens: gradients are summed.
        # Both settings act on one unit only.
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)


def _place(model: Llama, mesh: DeviceMesh) -> None:
    """Make the weights that tp has not placed DTensors, as those of any other layout are."""
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if isinstance(weight, nn.Parameter) and not isinstance(weight, DTensor):
            placed = distribute_tensor(weight, mesh, [Shard(0)], src_data_rank=None)
            module.weight = nn.Parameter(placed)
    model.tie_weights()


def _unevenly_sharded_by_tp(parameter: nn.Parameter) -> bool:
    """Whether the tp shards of dim 0 have unequal sizes: an uneven vocabulary.

    DTensor gets the global offsets of shards of such shards wrong, and with them initialisation and
    checkpoints. These matrices are sharded over dp along the other dim.
    """
    if not isinstance(parameter, DTensor):
        return False
    (tp,) = parameter.placements
    return tp.is_shard(0) and parameter.shape[0] % parameter.device_mesh.size() != 0


def set_prefetch(model: Llama, *, forward: int, backward: int) -> None:
    """Gather the parameters of so many next blocks while one computes.

    Without this call FSDP2 gathers none ahead in the forward, where the host has not queued the
    block before, and in the backward the unit that ran before. In a pipeline that may be one of
    another micro-batch, which is gathered in vain.
    """
    if not isinstance(model, FSDPModule):
        return
    blocks = list(model.model.layers.values())
    for i, block in enumerate(blocks):
        block.set_modules_to_forward_prefetch(blocks[i + 1 : i + 1 + forward])
        # An empty list would leave it to FSDP2; the block itself is there already.
        ahead = blocks[max(0, i - backward) : i][::-1]
        block.set_modules_to_backward_prefetch(ahead or [block])
    embedding = model.model.embed_tokens
    if isinstance(embedding, FSDPModule):
        embedding.set_modules_to_backward_prefetch([embedding])


def begin_micro_batch(model: Llama | DistributedDataParallel, *, zero: int, last: bool) -> None:
    """Say what the next backward does with gradients and gathered parameters.

    ZeRO-2 and 3 reduce-scatter the gradients of every micro-batch, so that no rank holds more than
    its shard of them; replicas are summed over once a step. ZeRO-1 and 0 keep whole parameters and
    gradients from the first micro-batch to the last, and communicate once a step.
    """
    if isinstance(model, DistributedDataParallel):
        model.require_backward_grad_sync = last  # as within no_sync()
    elif not isinstance(model, FSDPModule):
        return
    elif zero >= 2:
        model.set_requires_all_reduce(last)
    else:
        model.set_requires_gradient_sync(last)
        model.set_reshard_after_backward(last)


def fsdp_units(model: nn.Module) -> list[FSDPModule]:
    """Every FSDP unit of ``model``, the root first."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def reshard(model: nn.Module) -> None:
    """Free the gathered parameters that a forward without a backward leaves behind."""
    for unit in fsdp_units(model):
        unit.reshard()
