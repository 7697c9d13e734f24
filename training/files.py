"""Files that survive a kill at any instant. Torch-free."""

import contextlib
import errno
import os
import socket
from pathlib import Path


def sync(path: Path) -> None:
    """Flush a file, or the names in a directory, to the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    except OSError as error:
        # Some network file systems refuse to sync a directory, and need not.
        if not path.is_dir() or error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(fd)


def write_atomic(path: Path, text: str) -> None:
    """Replace a file by ``text`` (UTF-8); on disk when this returns, never old and new mixed.

    Raises:
        OSError: if the directory is not writable or full; the old file is then untouched.
    """
    # The name differs by process: two ranks that write at once must not share a temporary file.
    temporary = path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8", newline="") as f:
            f.write(text)
            f.flush()
            os.fsync(f.fileno())
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    # Some network file systems refuse to sync a directory; the rename itself has happened.
    with contextlib.suppress(OSError):
        sync(path.parent)


def append_line(path: Path, line: str) -> None:
    """Add ``line`` and a newline to a file, or leave the file as it was.

    Raises:
        OSError: for example on a full disk.
    """
    data = line.encode() + b"\n"
    with path.open("ab", buffering=0) as f:
        before = f.seek(0, os.SEEK_END)
        try:
            if f.write(data) < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        except OSError:
            # A part of the line may have found room.
            f.truncate(before)
            raise
