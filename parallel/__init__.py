"""How one model is laid out over many devices.

``parallel.layout`` is torch-free and imported before anything heavy, so this file imports torch
only inside its function.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

    from models.llama import Llama


def parallelize(
    model: "Llama",
    mesh: "DeviceMesh",
    *,
    sequence_parallel: bool,
    zero: int,
    dtype: "torch.dtype",
    activation_checkpoint: str = "none",
    loss_chunks: int = 1,
    prefetch: int | None = None,
) -> None:
    """Lay ``model`` (on the meta device) out over ``mesh``, in place.

    The order matters: tensor parallelism replaces weights by DTensors on the tp mesh, and FSDP2
    then shards whatever it finds over dp, so that a weight ends on both dims.

    Args:
        sequence_parallel: cut the residual stream along the sequence over tp.
        zero: what the dp ranks share out.
        dtype: compute dtype.
        activation_checkpoint: "none", "selective" or "full".
        loss_chunks: parts of the sequence whose logits exist at a time.
        prefetch: blocks whose parameters are gathered ahead of their use; None leaves it to FSDP2.
    """
    from parallel.activation_checkpoint import apply_activation_checkpoint
    from parallel.context_parallel import apply_context_parallel
    from parallel.data_parallel import apply_fsdp, set_prefetch
    from parallel.tensor_parallel import apply_tensor_parallel

    if mesh["tp"].size() > 1:
        apply_tensor_parallel(model, mesh["tp"], sequence_parallel)
    apply_activation_checkpoint(model, activation_checkpoint)
    model.lm_head.loss_chunks = loss_chunks
    shard = "dp"
    if "cp" in mesh.mesh_dim_names:
        apply_context_parallel(model, mesh["cp"])
        # Ranks that hold other slices of a sequence hold other shards, too.
        shard = "dp_cp"
        mesh["dp", "cp"]._flatten(shard)
    replicated = "dp_replicate" in mesh.mesh_dim_names
    data = mesh["dp_replicate", shard] if replicated else mesh[shard]
    apply_fsdp(model, data, zero=zero, dtype=dtype)
    if prefetch is not None:
        set_prefetch(model, prefetch)
