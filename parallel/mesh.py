"""Process groups, the DeviceMesh, the device and the backend."""

import datetime
import os
import socket
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout

from common.errors import LayoutError
from parallel.launch import Launch
from parallel.layout import Layout
from parallel.rendezvous import meet


@dataclass(frozen=True)
class Ranks:
    """This process among the ranks of the run.

    Attributes:
        device: where the model lives.
        mesh: the mesh over all ranks, of :attr:`parallel.layout.Layout.mesh_dims`.
        control: a gloo group over all ranks for small CPU vectors, apart from the training traffic.
        store: a key-value store that all ranks reach, for waits without a collective's timeout.
    """

    launch: Launch
    device: torch.device
    mesh: DeviceMesh
    control: dist.ProcessGroup
    store: dist.Store

    @property
    def rank(self) -> int:
        """Global rank."""
        return self.launch.rank

    @property
    def tp(self) -> int:
        """Size of the tp dim."""
        return self.mesh.shape[-1]

    # Cached, because slicing a mesh builds a new one each time.

    @cached_property
    def dp_rank(self) -> int:
        """Coordinate in dp_replicate and dp: which part of the global batch this rank reads."""
        at, names = self.mesh.get_coordinate(), self.mesh.mesh_dim_names
        dp = names.index("dp")
        replica = at[names.index("dp_replicate")] if "dp_replicate" in names else 0
        return replica * self.mesh.shape[dp] + at[dp]

    def _size(self, dim: str) -> int:
        return dict(zip(self.mesh.mesh_dim_names, self.mesh.shape, strict=True)).get(dim, 1)

    @cached_property
    def pp_rank(self) -> int:
        """Coordinate in the pp dim: which stages this rank holds."""
        return self.mesh.get_local_rank("pp") if "pp" in self.mesh.mesh_dim_names else 0

    @property
    def cp(self) -> int:
        """Size of the cp dim."""
        return self._size("cp")

    @cached_property
    def cp_rank(self) -> int:
        """Coordinate in the cp dim: which slices of a sequence this rank holds."""
        return self.mesh.get_local_rank("cp") if "cp" in self.mesh.mesh_dim_names else 0

    @cached_property
    def tp_rank(self) -> int:
        """Coordinate in the tp dim."""
        return self.mesh.get_local_rank("tp")

    @cached_property
    def tp_group(self) -> dist.ProcessGroup | None:
        """The tensor-parallel group, or None where there is nothing to communicate."""
        return self.mesh.get_group("tp") if self.tp > 1 else None


def make_mesh(device_type: str, layout: Layout) -> DeviceMesh:
    """The mesh of a layout: mostly the dims ("dp", "tp"), tp innermost."""
    dims = layout.mesh_dims
    return init_device_mesh(device_type, tuple(dims.values()), mesh_dim_names=tuple(dims))


def sharding_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The ranks that shard parameters: dp, and cp, where they read other slices of a batch."""
    if "cp" not in mesh.mesh_dim_names:
        return mesh["dp"]
    return mesh["dp", "cp"]._flatten("dp_cp")


def fsdp_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The mesh of FSDP2: :func:`sharding_mesh`, behind the dim of its replicas if there are any."""
    shards = sharding_mesh(mesh)
    if "dp_replicate" not in mesh.mesh_dim_names:
        return shards
    return DeviceMesh._concatenate([mesh["dp_replicate"], shards])


def _set_timeout(mesh: DeviceMesh, timeout: datetime.timedelta) -> None:
    """Give all groups of a mesh a timeout: it builds them with torch's own, of half an hour."""
    for dim in mesh.mesh_dim_names:
        _set_pg_timeout(timeout, mesh.get_group(dim))
    _set_pg_timeout(timeout, sharding_mesh(mesh).get_group())


def init_ranks(
    launch: Launch,
    layout: Layout,
    comm_timeout: float,
    cpu_offload: bool = False,
    store: dist.Store | None = None,
) -> Ranks:
    """Build the process groups and the mesh: cuda and nccl where there is CUDA, else cpu and gloo.

    Args:
        comm_timeout: seconds until a collective that does not complete is an error.
        store: one that all ranks have met at already; none: they meet at the launcher's address.

    Raises:
        LayoutError: if there are more processes on this node than GPUs, or none to offload from.
        MeetingError: if the ranks do not come together.
    """
    if torch.cuda.is_available():
        if launch.local_rank >= torch.cuda.device_count():
            raise LayoutError(
                f"{launch.local_world_size} processes on {socket.gethostname()} for "
                f"{torch.cuda.device_count()} GPUs: start one process per GPU, or set "
                "CUDA_VISIBLE_DEVICES= to train on the CPU"
            )
        device, backend = torch.device("cuda", launch.local_rank), "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(device)
    else:
        if cpu_offload:
            raise LayoutError(
                f"--cpu-offload on {socket.gethostname()}, which has 0 GPUs: everything is on the "
                "CPU already; leave it out"
            )
        device, backend = torch.device("cpu"), "gloo"
    # The last collectives of a rank, which a diagnosis reads; the groups look it up when made.
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
    store = store or meet(launch, comm_timeout)
    timeout = datetime.timedelta(seconds=comm_timeout)
    dist.init_process_group(
        backend, store=store, rank=launch.rank, world_size=launch.world_size, timeout=timeout
    )
    control = dist.new_group(backend="gloo", timeout=timeout, group_desc="control")
    mesh = make_mesh(device.type, layout)
    _set_timeout(mesh, timeout)
    return Ranks(launch, device, mesh, control, store)
