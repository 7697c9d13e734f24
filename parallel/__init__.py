"""How one model is laid out over many devices.

``layout``, ``stages`` and ``plan`` are torch-free, and imported where nothing heavy is, so this
file imports torch only inside its function.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

    from models.decoder import Llama
    from parallel.stages import Stage


def parallelize(
    model: "Llama",
    mesh: "DeviceMesh",
    *,
    sequence_parallel: bool,
    zero: int,
    dtype: "torch.dtype",
    activation_checkpoint: str = "none",
    compile: bool = False,
    cpu_offload: bool = False,
    loss_chunks: int = 1,
    prefetch: int | None = None,
    grad_compression: str = "none",
    stages: "Sequence[Stage]" = (),
) -> "list[Llama]":
    """Lay ``model`` (on the meta device) out over ``mesh``, in place.

    The order matters: a pipeline leaves this rank its blocks, tensor parallelism replaces their
    weights by DTensors on the tp mesh, and FSDP2 then shards whatever it finds over dp, so that a
    weight ends on both dims.

    Args:
        sequence_parallel: cut the residual stream along the sequence over tp.
        zero: what the dp ranks share out.
        dtype: compute dtype.
        activation_checkpoint: "none", "selective" or "full".
        compile: compile each block.
        cpu_offload: shards and gradients are on the CPU; materialise ``model`` there.
        loss_chunks: parts of the sequence whose logits exist at a time.
        prefetch: blocks whose parameters are gathered ahead of their use; None leaves it to FSDP2.
        grad_compression: other than "none", and on more than one rank, parameters stay plain
            tensors, for :func:`parallel.grad_compression.replicate` once they hold values.
        stages: of this rank, in a pipeline.

    Returns:
        What a forward runs through: the stages of this rank in order, or the model itself.
    """
    from torch.distributed.device_mesh import DeviceMesh

    from parallel.activation_checkpoint import apply_activation_checkpoint
    from parallel.context_parallel import apply_context_parallel
    from parallel.data_parallel import apply_fsdp, set_prefetch
    from parallel.grad_compression import set_compute_dtype
    from parallel.mesh import sharding_mesh
    from parallel.tensor_parallel import apply_tensor_parallel

    data = sharding_mesh(mesh)
    if "dp_replicate" in mesh.mesh_dim_names:
        data = DeviceMesh._concatenate([mesh["dp_replicate"], data])
    model.lm_head.loss_chunks = loss_chunks
    parts = [model]
    if stages:
        from parallel.pipeline import split

        parts = split(model, stages)
    for part in parts:
        if mesh["tp"].size() > 1:
            apply_tensor_parallel(part, mesh["tp"], sequence_parallel)
        apply_activation_checkpoint(part, activation_checkpoint, compiled=compile)
        if "cp" in mesh.mesh_dim_names:
            apply_context_parallel(part, mesh["cp"])
        if grad_compression != "none" and mesh.size() > 1:
            set_compute_dtype(part, dtype)
            continue
        apply_fsdp(part, data, zero=zero, dtype=dtype, cpu_offload=cpu_offload)
        if prefetch is not None:
            set_prefetch(part, forward=prefetch, backward=prefetch)
        elif stages:
            set_prefetch(part, forward=0, backward=1)
    return parts
