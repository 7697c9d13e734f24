"""The torchrun that started this process: whether it is there, and what it prints. Torch-free.

A rank outlives a torchrun that is killed, and nobody would see it train, hold the run directory and
its GPUs. What starts a run without torchrun may end, as a shell does before ``nohup``.
"""

import contextlib
import json
import os
import sys
import threading
import time
from pathlib import Path

GONE = "torchrun has ended"
MARK = "TORCHELASTIC_RUN_ID"
WATCH_S = 1.0


def _parent(pid: int | str) -> int:
    # The name of a process, in parentheses, may hold anything.
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


class Launcher:
    """torchrun, as seen from a rank that it has started, perhaps through a wrapper.

    Attributes:
        started: ``time.monotonic()`` when this process began.
        training: whether the run stops by itself in its next step; until then this process ends.
    """

    def __init__(self):
        self.started, self.training = time.monotonic(), False
        self._top, self._parent = os.getpid(), os.getppid()
        self._watched = MARK in os.environ
        # Of the process that torchrun has started, which is a wrapper where that one does not exec.
        with contextlib.suppress(OSError, ValueError, IndexError):
            while self._watched and self._is_worker(self._parent):
                self._top, self._parent = self._parent, _parent(self._parent)

    @staticmethod
    def _is_worker(pid: int) -> bool:
        names = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        return any(name.startswith(f"{MARK}=".encode()) for name in names)

    def gone(self) -> bool:
        """Whether torchrun has started this process and has ended."""
        if not self._watched:
            return False
        if self._top == os.getpid():
            return os.getppid() != self._parent
        try:
            return _parent(self._top) != self._parent
        except (OSError, ValueError, IndexError):
            return True  # with the wrapper

    def watch_start(self) -> None:
        """End this process with torchrun for as long as there is nothing to save."""
        if self._watched:
            threading.Thread(target=self._watch, name="launcher", daemon=True).start()

    def _watch(self) -> None:
        while not self.training:
            if self.gone():
                with contextlib.suppress(OSError):
                    print(f"train_llm.py: error: {GONE}", file=sys.stderr, flush=True)
                os._exit(1)
            time.sleep(WATCH_S)


def report_failure(message: str) -> None:
    """Write what torchrun is to print of this process, beside its exit code."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    # torchrun shows the stack in place of the message.
    extra = {"py_callstack": message, "timestamp": str(int(time.time()))}
    with contextlib.suppress(OSError):
        Path(path).write_text(
            json.dumps({"message": {"message": message, "extraInfo": extra}}), encoding="utf-8"
        )
