"""Files that survive a kill, and what cannot be read told from what is not there. Torch-free."""

import contextlib
import errno
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from training.config import ConfigError


@contextlib.contextmanager
def readable(path: Path) -> Iterator[None]:
    """Leave the block where a file does not exist, and refuse in one line what else goes wrong.

    Raises:
        ConfigError: for every other error of the file system, as a missing permission.
    """
    try:
        yield
    except FileNotFoundError:
        return
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read ({error.strerror}): have its owner make it readable (chmod), "
            "or name another directory"
        ) from None


def names_in(folder: Path) -> list[str]:
    """The names in a directory; none where it does not exist.

    Raises:
        ConfigError: if they cannot be read, or if a symbolic link on the way leads nowhere.
    """
    with readable(folder):
        return os.listdir(folder)
    for path in (folder, *folder.parents):
        # As where the disk that it is on is not mounted: nothing is known of what it holds.
        if os.path.islink(path) and not os.path.exists(path):
            raise ConfigError(
                f"{path} is a symbolic link to {os.readlink(path)}, which does not exist: "
                "mount that, or remove the link"
            )
    return []


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
