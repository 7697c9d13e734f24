"""Files that may come from elsewhere, and files that survive a kill. Torch-free.

What cannot be read is told from what is not there.
"""

import contextlib
import errno
import json
import os
import socket
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from common.errors import ConfigError
from common.text import shown

# Where the code lies.
REPO = Path(__file__).parent.parent


@contextlib.contextmanager
def open_regular(path: Path) -> Iterator[BinaryIO]:
    """Open a regular file for reading; a FIFO or a device is not read.

    Raises:
        OSError: from the file system; FileNotFoundError alone means that there is no such file.
        ValueError: in words that follow the file's name, if it is no regular file.
    """
    # Without O_NONBLOCK, to open a FIFO is to wait for its writer.
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ValueError("is no regular file")
        yield file


def read_bounded(path: Path, limit: int) -> bytes:
    """The content of a regular file of at most ``limit`` bytes; a FIFO or a device is not read.

    Raises:
        OSError: from the file system; FileNotFoundError alone means that there is no such file.
        ValueError: in words that follow the file's name, if it is no regular file or is larger.
    """
    with open_regular(path) as file:
        data = file.read(limit + 1)  # the size that a file system states may be wrong, as in /proc
    if len(data) > limit:
        raise ValueError(f"has more than the {limit:,} bytes that it can need")
    return data


def read_json(path: Path, limit: int = 1 << 26) -> Any:
    """The JSON value in a regular file of at most ``limit`` bytes.

    Raises:
        OSError: as in :func:`read_bounded`.
        ValueError: in words that follow the file's name, if there is no such value in it.
    """
    try:
        return json.loads(read_bounded(path, limit), object_pairs_hook=_without_duplicates)
    except RecursionError:
        raise ValueError("is nested too deeply") from None


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        seen = set()
        for name, _ in pairs:
            if name in seen:
                raise ValueError(f"states {shown(name)} twice")
            seen.add(name)
    return value


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


def git_commit() -> str | None:
    """The commit that this code is of; None where it is in no repository."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        here = ["git", "-C", str(REPO), "rev-parse", "HEAD"]
        done = subprocess.run(here, capture_output=True, text=True, check=True, timeout=30)
        return done.stdout.strip()
    return None
