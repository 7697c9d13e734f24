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
) -> None:
    """Lay ``model`` (on the meta device) out over ``mesh``, in place.

    The order matters: tensor parallelism replaces weights by DTensors on the tp mesh, and FSDP2
    then shards whatever it finds over dp, so that a weight ends on both dims.
    """
    from parallel.data_parallel import apply_fsdp
    from parallel.tensor_parallel import apply_tensor_parallel

    if mesh["tp"].size() > 1:
        apply_tensor_parallel(model, mesh["tp"], sequence_parallel)
    replicated = "dp_replicate" in mesh.mesh_dim_names
    data = mesh["dp_replicate", "dp"] if replicated else mesh["dp"]
    apply_fsdp(model, data, zero=zero, dtype=dtype)
