"""Printing to streams that may be closed, full, or without a reader. Torch-free."""

import contextlib
import io
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn, TextIO

from common.secrets import masked

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


def say(text: str, stream: TextIO) -> None:
    """Print a line at once, or not at all where the stream cannot be written.

    The output of a job is often redirected to a disk that is full, or to a reader that has gone.
    """
    with contextlib.suppress(OSError):
        print(masked(text), file=stream, flush=True)


class _Stdout(io.FileIO):
    """A file that keeps its last error of writing, which can so be told from any other error."""

    fault: OSError | None = None

    def write(self, data: "ReadableBuffer") -> int:
        try:
            return super().write(data)
        except OSError as error:
            self.fault = error
            raise


def _open_stdout() -> tuple[_Stdout, TextIO]:
    """Stdout opened again, as a file and as text: encoded and buffered as by Python."""
    if sys.stdout is None:
        # Stdout is closed: Python would print to nowhere, and open the next file as stdout.
        file = _Stdout(os.open(os.devnull, os.O_RDONLY), "w")
        encoding, errors = "utf-8", None
    else:
        file = _Stdout(sys.stdout.fileno(), "w", closefd=False)
        encoding, errors = sys.stdout.encoding, sys.stdout.errors
    lines = file.isatty() or bool(os.environ.get("PYTHONUNBUFFERED"))
    buffer = io.BufferedWriter(file)
    return file, io.TextIOWrapper(buffer, encoding, errors, line_buffering=lines)


def run_command(main: Callable[[], int | None], program: str) -> NoReturn:
    """Run a command and exit with its code, or with 1 where stdout cannot be written.

    A reader that has gone, as ``| head``, gets no message; a full disk or a closed stdout does.
    """
    file, sys.stdout = _open_stdout()
    try:
        try:
            code: str | int | None = main()
        except SystemExit as error:
            code = error.code
        sys.stdout.flush()
    except OSError as error:
        if error is not file.fault:
            raise
        if not isinstance(error, BrokenPipeError):
            say(f"{program}: error: stdout cannot be written ({error.strerror})", sys.stderr)
        # The unwritten rest would make Python's own exit fail.
        sys.stdout, code = open(os.devnull, "w"), 1  # noqa: SIM115
    sys.exit(code)
