"""The torchrun that started this process: whether it lives, and what it prints. Torch-free.

A rank outlives a torchrun that is killed, and would go on unseen, with the run directory locked and
its GPUs in use. A run without torchrun may outlive its parent, as with ``nohup``.
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
        training: whether the training loop looks for torchrun, and stops without it; before that,
            :meth:`watch_start` ends the process.
    """

    def __init__(self):
        self.started, self.training = time.monotonic(), False
        self._top, self._parent = os.getpid(), os.getppid()
        self._watched = MARK in os.environ
        # torchrun's child may be a wrapper around this process: its parent is the one to watch.
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
        """End this process as soon as torchrun has ended, until the training loop has begun."""
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
    """Write the message that torchrun prints beside the exit code of this process."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    # torchrun prints the stack, not the message.
    extra = {"py_callstack": message, "timestamp": str(int(time.time()))}
    with contextlib.suppress(OSError):
        Path(path).write_text(
            json.dumps({"message": {"message": message, "extraInfo": extra}}), encoding="utf-8"
        )
