"""OUT_DIR of an export, and the hidden folder next to it that becomes OUT_DIR."""

import contextlib
import errno
import fcntl
import glob
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from common.errors import ConfigError
from common.text import printable
from training.data.sources import one_line

LOCK = ".lock"


def resolve_out(out: Path) -> Path:
    """OUT_DIR with no link in it, since the folder is put in place by a rename.

    Raises:
        ConfigError: if its links go in a circle.
    """
    try:
        return out.expanduser().resolve()
    except RuntimeError as error:
        raise ConfigError(f"OUT_DIR {out}: {one_line(error)}") from None


def is_taken(out: Path) -> bool:
    """Whether something is at ``out`` that an export would have to replace."""
    return os.path.lexists(out) and not (out.is_dir() and not any(out.iterdir()))


def check_out(out: Path, partial: Path, checkpoint: Path) -> None:
    """Check that OUT_DIR can be made, by way of ``partial`` next to it.

    Raises:
        ConfigError: in one line.
    """
    folder = checkpoint.resolve()
    folder = folder.parent if folder.parent.name == "checkpoints" else folder
    if out.is_relative_to(folder):
        raise ConfigError(
            f"OUT_DIR {out} is among the checkpoints, which the run removes: name another one"
        )
    if os.path.ismount(out):
        raise ConfigError(f"OUT_DIR {out} is a mount point: name a folder in it")
    try:
        parent = next(folder for folder in out.parents if folder.exists())
        if not os.access(parent, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        with contextlib.suppress(FileNotFoundError):
            partial.lstat()  # its name is longer than that of OUT_DIR, and may be too long
    except OSError as error:
        raise ConfigError(
            f"OUT_DIR {printable(str(out))} cannot be made ({error.strerror}): name another one"
        ) from None


def partial_folder(checkpoint: Path, out: Path, dtype: str, shard_size: int) -> Path:
    """The hidden folder next to ``out`` that becomes ``out`` when everything is in it.

    Its name has a hash of what is exported and how. So all processes agree on it without
    communication, and the files of a killed export in it need not be written again.

    Raises:
        ConfigError: if the checkpoint is not there, as when its run has just removed it.
    """
    try:
        metadata = (checkpoint / ".metadata").stat()
        state = (checkpoint / "state.json").read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"{checkpoint} cannot be read ({error.strerror}): name another checkpoint"
        ) from None
    key = [state, metadata.st_mtime_ns, metadata.st_size, dtype, shard_size]
    name = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:12]
    return out.with_name(f".{out.name}.partial-{name}")


def _lock(folder: Path, flags: int) -> int | None:
    """A descriptor of the lock of a folder, locked; None if another process has locked it."""
    fd = os.open(folder / LOCK, os.O_RDWR | flags, 0o644)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # The other process may have put the folder in place meanwhile.
        busy = not os.path.samestat(os.fstat(fd), (folder / LOCK).stat())
    except OSError as error:
        # Some cluster file systems are mounted without locks: there the last rename decides.
        busy = error.errno in (errno.EWOULDBLOCK, errno.EACCES, errno.ENOENT)
    if busy:
        os.close(fd)
    return None if busy else fd


@contextlib.contextmanager
def locked(partial: Path, out: Path) -> Iterator[None]:
    """Make the folder that becomes ``out``, and lock every other export to ``out`` out.

    The lock moves with the folder; the kernel releases it when this process ends in any way.

    Raises:
        ConfigError: if another process exports to ``out``, or the folder cannot be made.
    """
    try:
        partial.mkdir(parents=True, exist_ok=True)
        fds = [_lock(partial, os.O_CREAT)]
    except OSError as error:
        raise ConfigError(
            f"OUT_DIR {out} cannot be made ({error.strerror}): name another one"
        ) from None
    # An export with other settings has another folder.
    for folder in out.parent.glob(f".{glob.escape(out.name)}.partial-*"):
        if folder != partial:
            with contextlib.suppress(FileNotFoundError):
                fds.append(_lock(folder, 0))
    try:
        if None in fds:
            if fds[0] is not None:
                discard(partial)
            raise ConfigError(
                f"OUT_DIR {out} is being written by another export: wait for it, or name "
                "another one"
            )
        yield
    finally:
        for fd in fds:
            if fd is not None:
                os.close(fd)


def discard(partial: Path) -> None:
    """Remove what a failed export has written, also while other processes still write there."""
    # No process adds a file to a folder of another name.
    doomed = partial.with_name(f"{partial.name}.{os.getpid()}")
    with contextlib.suppress(OSError):
        partial.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


@contextlib.contextmanager
def removed_on_failure(partial: Path) -> Iterator[None]:
    """Remove ``partial`` if the block fails; after a kill the same command goes on from it."""
    try:
        yield
    except Exception:
        discard(partial)
        raise


def check_present(partial: Path) -> None:
    """Check that ``partial`` is there: a process that fails removes it.

    Raises:
        ConfigError: if it is gone.
    """
    if not partial.is_dir():
        raise ConfigError("another process of this export has failed, and says why")
