"""How a checkpoint is written and read: torch.distributed.checkpoint's files, with checksums."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from common.errors import ConfigError
from common.files import read_bounded
from parallel.mesh import Ranks
from training.checkpoint.folder import (
    STATE,
    DamageError,
    check_file,
    file_size,
    file_sum,
    read_checked,
    read_checkpoint_state,
    read_sums,
)
from training.checkpoint.metadata import METADATA, parse_metadata

# 1,000 ranks with 1,000 tensors each have a third of that.
_MAX_METADATA_BYTES = 1 << 30


class CheckpointReader(dcp.FileSystemReader):
    """Reads a checkpoint of :class:`CheckpointWriter`; executes nothing that is in it.

    Attributes:
        sizes: once the metadata is read, the bytes that each file with shards needs, by name.
    """

    def read_metadata(self, *args, **kwargs) -> Metadata:
        """The description of all tensors.

        Raises:
            DamageError: if it cannot be read, or holds anything but such a description.
            OSError: from the file system.
        """
        file_size(Path(self.path, METADATA))
        try:
            data = read_bounded(Path(self.path, METADATA), _MAX_METADATA_BYTES)
        except ValueError as error:
            raise DamageError(f"{METADATA} {error}") from None
        metadata, self.sizes = parse_metadata(data)
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
        check: called on every rank before anything is written; what it raises reaches all ranks.
    """

    def __init__(
        self,
        folder: Path,
        commit: Callable[[dict[str, str]], None],
        check: Callable[[], None] = lambda: None,
    ):
        super().__init__(folder)
        self._commit, self._check = commit, check

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Make the folder."""
        self._check()
        return super().prepare_local_plan(plan)

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


def check_share(checkpoint: Path, rank: int, world_size: int) -> None:
    """Compare this process's share of the files of a checkpoint with their checksums.

    What the small files say comes first: no file is read that is not needed, or is larger than it
    need be.

    Raises:
        DamageError: if one is not what was written.
        ConfigError: if the file system does not let it be read.
    """
    sums = read_sums(checkpoint)
    read_checkpoint_state(checkpoint)
    read_checked(checkpoint, METADATA, sums, min(len(sums) << 23, _MAX_METADATA_BYTES))
    reader = CheckpointReader(checkpoint)
    reader.read_metadata()
    needed = {STATE, METADATA, *reader.sizes}
    if absent := sorted(needed - sums.keys()):
        raise DamageError(f"SHA256SUMS does not name {absent[0]}")
    if strange := sorted(sums.keys() - needed):
        raise DamageError(f"SHA256SUMS names {strange[0]}, of which {METADATA} knows nothing")
    for name in sorted(sums)[rank::world_size]:
        size = reader.sizes.get(name)
        if size is not None and file_size(checkpoint / name) > size:
            raise DamageError(f"{name} has more than the {size:,} bytes that {METADATA} knows of")
        check_file(checkpoint, name, sums)
        if size is not None and file_size(checkpoint / name) < size:
            raise DamageError(f"{name} has less than the {size:,} bytes that {METADATA} knows of")


def find_fault(checkpoint: Path, ranks: Ranks) -> str | None:
    """What is wrong with a checkpoint, the same answer on all ranks; None if it is whole.

    Each rank reads its share of the files, so that this takes the time of reading the checkpoint
    once with all of them.

    Raises:
        ConfigError: on all ranks, if the file system does not let one read it.
    """
    fault = refusal = None
    try:
        check_share(checkpoint, ranks.rank, ranks.launch.world_size)
    except DamageError as error:
        fault = str(error)
    except ConfigError as error:
        refusal = str(error)
    answers = [(None, None)] * ranks.launch.world_size
    dist.all_gather_object(answers, (fault, refusal), group=ranks.control)
    faults, refusals = zip(*answers, strict=True)
    if refusal := next(filter(None, refusals), None):
        raise ConfigError(refusal)
    return next(filter(None, faults), None)
