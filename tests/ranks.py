"""Multi-process groups for tests: N gloo ranks that stay alive and run one function after another.

The ranks are forked from Python's fork server, which has imported torch once and done nothing
else, so that a group of 8 starts in a second and a fork never copies a live autograd engine.
"""

import contextlib
import ctypes
import datetime
import faulthandler
import multiprocessing
import os
import signal
import socket
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import wait

# Every gloo group has threads that wake a hundred times a second for as long as it exists: ranks
# are stopped while nobody needs them, and ended with too many groups behind them.
MAX_THREADS = 80
PR_SET_PDEATHSIG = 1
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.ranks_preload"])


class RankError(AssertionError):
    """A rank failed; the message holds the rank and its traceback."""


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def _serve(rank: int, world_size: int, port: int | None, pipe, log: str) -> None:
    """Body of one rank: build the process group, then run what comes through the pipe."""
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(output, stream)
    faulthandler.register(signal.SIGQUIT, all_threads=True)
    # A stopped process does not see that the tests are gone.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(world_size),
    }
    if port is not None:
        dist.init_process_group(
            "gloo",
            init_method=f"tcp://127.0.0.1:{port}",
            rank=rank,
            world_size=world_size,
            timeout=datetime.timedelta(seconds=60),
        )
    while True:
        message = pipe.recv()
        if message is None:
            os._exit(0)
        function, args, kwargs = message
        try:
            pipe.send(("ok", function(*args, **kwargs)))
        except BaseException:
            pipe.send(("error", traceback.format_exc()))


class Group:
    """N ranks in one gloo process group, or, without one, as a launcher would start them."""

    def __init__(self, world_size: int, timeout: float = 120.0, process_group: bool = True):
        self.world_size, self.timeout = world_size, timeout
        self._process_group = process_group
        self._processes: list = []

    def _start(self) -> None:
        port = free_port() if self._process_group else None
        self._log = tempfile.NamedTemporaryFile(prefix="ranks-", suffix=".log")  # noqa: SIM115
        self._pipes = []
        for rank in range(self.world_size):
            here, there = CONTEXT.Pipe()
            process = CONTEXT.Process(
                target=_serve,
                args=(rank, self.world_size, port, there, self._log.name),
                daemon=True,
            )
            process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)

    def run(self, function: Callable, *args, **kwargs) -> list:
        """Call a module-level ``function`` on every rank; the results in rank order.

        Raises:
            RankError: with the traceback of every rank that failed, or the stacks of those that
                hang. The group is started anew after either.
        """
        if not self._processes:
            self._start()
        self._signal(signal.SIGCONT)
        for pipe in self._pipes:
            pipe.send((function, args, kwargs))
        results, faults = [None] * self.world_size, []
        waiting = dict(zip(self._pipes, range(self.world_size), strict=True))
        deadline = time.monotonic() + self.timeout
        while waiting:
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                faults += [f"rank {rank} hangs" for rank in waiting.values()]
                break
            for pipe in ready:
                rank = waiting.pop(pipe)
                try:
                    state, results[rank] = pipe.recv()
                except (EOFError, OSError):
                    state, results[rank] = "error", "died"
                if state == "error":
                    faults.append(f"rank {rank}: {results[rank]}")
                    # The others may wait for the failed one until the collective's timeout.
                    deadline = min(deadline, time.monotonic() + 3)
        if faults:
            raise RankError("\n".join([*faults, self._end()]))
        if len(os.listdir(f"/proc/{self._processes[0].pid}/task")) > MAX_THREADS:
            self.close()
        self._signal(signal.SIGSTOP)
        return results

    def _signal(self, number: int) -> None:
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, number)

    def _end(self) -> str:
        """Kill the ranks after asking for their stacks; what they wrote to stdout and stderr."""
        self._signal(signal.SIGQUIT)
        time.sleep(0.5)
        text = open(self._log.name, errors="replace").read()  # noqa: SIM115
        self.close()
        return text[-8000:]

    def close(self) -> None:
        """End the ranks; the next run starts new ones."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        if self._processes:
            self._log.close()
        self._processes = []
