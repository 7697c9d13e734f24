"""How one model is laid out over many devices.

``layout``, ``launch``, ``options``, ``rules`` and ``stages`` are torch-free, and imported where
nothing heavy is, so this file imports torch only inside its function.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from models.decoder import Llama
    from parallel.options import ParallelOptions
    from parallel.stages import Stage


def parallelize(
    model: "Llama",
    mesh: "DeviceMesh",
    options: "ParallelOptions",
    *,
    zero: int = 3,
    stages: "Sequence[Stage]" = (),
) -> "list[Llama]":
    """Lay ``model`` (on the meta device) out over ``mesh``, in place.

    The order matters: a pipeline leaves this rank its blocks, tensor parallelism replaces their
    weights by DTensors on the tp mesh, and FSDP2 then shards whatever it finds over dp, so that a
    weight ends on both dims.

    With ``cpu_offload`` the model is to be materialised on the CPU. With ``grad_compression``, on
    more than one rank, parameters stay plain tensors, for
    :func:`parallel.grad_compression.replicate` once they have values.

    Args:
        zero: what the dp ranks shard, as ``--zero`` says.
        stages: of this rank, in a pipeline.

    Returns:
        What a forward runs through: the stages of this rank in order, or the model itself.
    """
    import torch

    from parallel.activation_checkpoint import apply_activation_checkpoint
    from parallel.context_parallel import apply_context_parallel
    from parallel.data_parallel import apply_fsdp, set_prefetch
    from parallel.grad_compression import set_compute_dtype
    from parallel.mesh import fsdp_mesh
    from parallel.tensor_parallel import apply_tensor_parallel

    dtype = getattr(torch, options.dtype)
    model.lm_head.loss_chunks = options.loss_chunks
    parts = [model]
    if stages:
        from parallel.pipeline import split

        parts = split(model, stages)
    for part in parts:
        if mesh["tp"].size() > 1:
            apply_tensor_parallel(part, mesh["tp"], options.sequence_parallel)
        apply_activation_checkpoint(part, options.activation_checkpoint, compiled=options.compile)
        if "cp" in mesh.mesh_dim_names:
            apply_context_parallel(part, mesh["cp"])
        if options.grad_compression != "none" and mesh.size() > 1:
            set_compute_dtype(part, dtype)
            continue
        apply_fsdp(part, fsdp_mesh(mesh), zero=zero, dtype=dtype, cpu_offload=options.cpu_offload)
        if options.prefetch is not None:
            set_prefetch(part, forward=options.prefetch, backward=options.prefetch)
        elif stages:
            set_prefetch(part, forward=0, backward=1)
    return parts
