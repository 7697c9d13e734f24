"""What is printed, where nobody or nothing may take it. Torch-free."""

import contextlib
import io
import os
import sys
from collections.abc import Callable
from typing import NoReturn, TextIO

from common.secrets import masked


def say(text: str, stream: TextIO) -> None:
    """Print a line at once, or not at all where the stream takes nothing more.

    What a job prints is often redirected to the disk that is full, or to a reader that has gone.
    """
    with contextlib.suppress(OSError):
        print(masked(text), file=stream, flush=True)


class _Stdout(io.FileIO):
    """A file that remembers the last error of writing to it, to be told from any other error."""

    fault: OSError | None = None

    def write(self, data) -> int | None:
        try:
            return super().write(data)
        except OSError as error:
            self.fault = error
            raise


def _open_stdout() -> tuple[_Stdout, TextIO]:
    """Stdout anew, as a file and as text: encoded and buffered as Python has opened it."""
    if sys.stdout is None:
        # Closed: Python would print to nowhere, and the next file would be opened as stdout.
        file, options = _Stdout(os.open(os.devnull, os.O_RDONLY), "w"), {"encoding": "utf-8"}
    else:
        file = _Stdout(sys.stdout.fileno(), "w", closefd=False)
        options = {"encoding": sys.stdout.encoding, "errors": sys.stdout.errors}
    lines = file.isatty() or bool(os.environ.get("PYTHONUNBUFFERED"))
    return file, io.TextIOWrapper(io.BufferedWriter(file), line_buffering=lines, **options)


def run_command(main: Callable[[], int | None], program: str) -> NoReturn:
    """Run a command and leave with its exit code, or with 1 where stdout does not take its output.

    A reader that has gone, as ``| head``, needs no word; a full disk or a closed stdout gets one.
    """
    file, sys.stdout = _open_stdout()
    try:
        try:
            code = main()
        except SystemExit as leaving:
            code = leaving.code
        sys.stdout.flush()
    except OSError as error:
        if error is not file.fault:
            raise
        if not isinstance(error, BrokenPipeError):
            say(f"{program}: error: stdout cannot be written ({error.strerror})", sys.stderr)
        # What could not be printed would make Python's own exit fail.
        sys.stdout, code = open(os.devnull, "w"), 1  # noqa: SIM115
    sys.exit(code)
