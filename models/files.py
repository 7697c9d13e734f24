"""Files that may come from elsewhere, read with care. Torch-free."""

import contextlib
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO


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
        return json.loads(read_bounded(path, limit))
    except RecursionError:
        raise ValueError("is nested too deeply") from None


def printable(text: str) -> str:
    """``text`` in one line, with everything escaped that a terminal would act on."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
