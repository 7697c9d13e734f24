"""How a checkpoint is written and read: torch.distributed.checkpoint's files, with checksums.

The metadata that DCP writes is a pickle. It is read through an unpickler that knows only the
classes such metadata is made of, so that a checkpoint from elsewhere cannot run code.
"""

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from parallel.mesh import Ranks
from training.checkpoint_dir import (
    DamageError,
    check_file,
    file_sum,
    read_checkpoint_state,
    read_sums,
)

METADATA = ".metadata"
_IN_METADATA = {
    "torch.distributed.checkpoint.metadata": {
        "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties",
        "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size", *(n for n, v in vars(torch).items() if isinstance(v, torch.dtype))},
}  # fmt: skip


class _MetadataUnpickler(pickle.Unpickler):
    """Builds tensors' descriptions and nothing else.

    Not even DCP's BytesStorageMetadata: an entry of that kind is a pickle of its own.
    """

    def find_class(self, module: str, name: str):
        if name not in _IN_METADATA.get(module, ()):
            raise DamageError(f"{METADATA} names {module}.{name}, which no checkpoint needs")
        return super().find_class(module, name)


class CheckpointReader(dcp.FileSystemReader):
    """Reads a checkpoint of :class:`CheckpointWriter`; executes nothing that is in it."""

    def read_metadata(self, *args, **kwargs) -> Metadata:
        """The description of all tensors.

        Raises:
            DamageError: if it cannot be read, or holds anything but such a description.
        """
        try:
            with Path(self.path, METADATA).open("rb") as f:
                metadata = _MetadataUnpickler(f).load()
            # Together these say where each byte lies; nothing else of a checkpoint is a path.
            self.files = {info.relative_path for info in metadata.storage_data.values()}
        except DamageError:
            raise
        except FileNotFoundError:
            raise DamageError(f"{METADATA} is missing") from None
        except Exception as error:  # unpickling damaged bytes raises nearly every type
            raise DamageError(f"{METADATA} cannot be read ({type(error).__name__})") from None
        return metadata


def _disk_error(error: BaseException | None) -> OSError | None:
    while error is not None and not isinstance(error, OSError):
        error = error.__context__
    return error


@dataclass(frozen=True)
class _SummedResult(WriteResult):
    """What DCP tells the first rank about a written tensor, with the checksum of its file."""

    sha256: str


class CheckpointWriter(dcp.FileSystemWriter):
    """Writes and fsyncs this rank's shards; the first rank then makes a checkpoint of them.

    Args:
        folder: where the files go.
        commit: called once, on the first rank, with the checksums by file name, when every rank's
            files and the metadata are written. What it raises reaches all ranks.
    """

    def __init__(self, folder: Path, commit: Callable[[dict[str, str]], None]):
        super().__init__(folder)
        self._commit = commit

    def storage_meta(self) -> StorageMeta:
        """Nothing: DCP would note the path, which a rename is about to make wrong."""
        return StorageMeta()

    def write_data(self, plan, planner) -> Future[list[WriteResult]]:
        """Write this rank's shards, and read them back for their checksum."""
        try:
            results = super().write_data(plan, planner).wait()
        except RuntimeError as error:
            # torch.save's complaint about its archive hides the disk's.
            raise _disk_error(error) or error from None
        files = [result.storage_data.relative_path for result in results]
        sums = {name: file_sum(Path(self.path, name)) for name in set(files)}
        done = Future()
        done.set_result(
            [
                _SummedResult(r.index, r.size_in_bytes, r.storage_data, sums[name])
                for r, name in zip(results, files, strict=True)
            ]
        )
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the metadata and commit; on the first rank only."""
        super().finish(metadata, results)
        sums = {r.storage_data.relative_path: r.sha256 for rank in results for r in rank}
        self._commit(sums | {METADATA: file_sum(Path(self.path, METADATA))})


def find_fault(checkpoint: Path, ranks: Ranks) -> str | None:
    """What is wrong with a checkpoint, the same answer on all ranks; None if it is whole.

    Each rank reads its share of the files, so that this takes the time of reading the checkpoint
    once with all of them.
    """
    fault = None
    try:
        sums = read_sums(checkpoint)
        for name in sorted(sums)[ranks.rank :: ranks.launch.world_size]:
            check_file(checkpoint, name, sums)
        if ranks.rank == 0:
            read_checkpoint_state(checkpoint)
            reader = CheckpointReader(checkpoint)
            reader.read_metadata()
            if unknown := sorted({METADATA, *reader.files} - sums.keys()):
                raise DamageError(f"SHA256SUMS does not name {unknown[0]}")
    except DamageError as error:
        fault = str(error)
    faults = [None] * ranks.launch.world_size
    dist.all_gather_object(faults, fault, group=ranks.control)
    return next(filter(None, faults), None)
