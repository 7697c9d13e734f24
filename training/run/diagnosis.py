"""The post-mortem of a rank when a run hangs or fails: its stacks and its last collectives."""

import contextlib
import faulthandler
import functools
import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch._C._distributed_c10d as c10d
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _resolve_process_group

from common.files import REPO
from common.secrets import masked
from common.text import rank_ranges
from parallel.mesh import Ranks
from training.run.directory import RunDir
from training.run.waiting import current

# Collectives written of each group: a device may have thousands queued behind a stuck one.
OLDEST_UNFINISHED, NEWEST = 5, 10


class Diagnosis:
    """Writes the post-mortem of this rank into the ``diagnosis`` folder of a run.

    No method raises, and nothing that may block (a disk that is gone, a device that does not answer
    the flight recorder) runs in the thread of the caller. While the object lives, a crash of the
    interpreter writes its stacks into the rank's log, and SIGUSR2 does not end the process.
    """

    def __init__(self, run: RunDir, ranks: Ranks):
        self._run, self._rank, self._mesh = run, ranks.rank, ranks.mesh
        self._error: dict = {}
        with contextlib.suppress(OSError):
            # faulthandler keeps the file open: a crash is too late to open one.
            faulthandler.enable(run.log_file(ranks.rank).open("a"))
        self.asked_by_signal()

    def asked_by_signal(self) -> bool:
        """Whether SIGUSR2 has come since the last call.

        Read from the pipe of the C handler: Python's own handlers wait for the main thread, which
        may be blocked in a collective.
        """
        with contextlib.suppress(BlockingIOError):
            return signal.SIGUSR2 in os.read(_signals(), 1 << 16)
        return False

    def note(self, error: BaseException, *, lost_peer: bool) -> None:
        """Remember the exception of the main thread; every later post-mortem of this rank has it.

        Args:
            lost_peer: a collective raised the exception because a peer has left.
        """
        try:
            message = masked(str(error))
            text = masked("".join(traceback.format_exception(error)))
        except Exception:  # raised by the exception's own __str__
            message = text = "an error without words"
        frames = [(frame, line) for frame, line in traceback.walk_tb(error.__traceback__)][::-1]
        self._error = {
            "error": f"{type(error).__name__}: {message}"[:2000],
            "lost_peer": lost_peer,
            "traceback": text[-20000:],
            "frames": _frames(frames),
        }

    def calls(self) -> int:
        """How many collectives, sends and receives this rank has begun."""
        total = 0
        for group in list(dist.distributed_c10d._world.pg_map):
            with contextlib.suppress(RuntimeError):
                total += group._get_sequence_number_for_group()
        return total

    def place(self, phase: str) -> dict:
        """Where this rank stands: a short post-mortem for :mod:`training.run.waiting`."""
        lost = self._error.get("lost_peer", False)
        collectives, groups = _collectives(self._mesh, lost, phase)
        threads = _threads(self._error.get("frames"))[:1]
        frames = threads[0]["frames"] if threads else []
        record = {
            "phase": phase,
            "collectives": collectives,
            "groups": groups,
            "threads": [{"frames": frames[:3]}],
            "our_code": next((f for f in frames if not f.startswith(("/", "<"))), None),
        }
        return record | {"collectives": list(filter(None, [current(record)]))}

    def write(
        self, request: int, step: int, phase: str, then: Callable[[], None] = lambda: None
    ) -> threading.Thread:
        """Write the post-mortem of this rank and call ``then``, in the thread that is returned.

        Args:
            request: number of the request to all ranks. A rank whose file has a lower number than
                those of others has not answered.
        """

        def write() -> None:
            collectives, groups = _collectives(
                self._mesh, self._error.get("lost_peer", False), phase
            )
            record = {
                "rank": self._rank,
                "host": socket.gethostname(),
                "pid": os.getpid(),
                "time": time.time(),
                "request": request,
                "step": step,
                "phase": phase,
                **{key: value for key, value in self._error.items() if key != "frames"},
                "threads": _threads(self._error.get("frames")),
                "collectives": collectives,
                "groups": groups,
            }
            _replace(self._run.diagnosis_file(self._rank), record)
            with contextlib.suppress(RuntimeError):
                then()

        thread = threading.Thread(target=write, name="diagnosis", daemon=True)
        thread.start()
        return thread

    def write_beats(self, request: int, beats: list[Sequence]) -> threading.Thread:
        """Write the last beats of all ranks, some of which may not answer any more.

        Args:
            request: as in :meth:`write`.
            beats: the :class:`training.run.heartbeat.Beat` of every rank.
        """
        record = {"time": time.time(), "request": request, "beats": beats}
        path = self._run.diagnosis / "beats.json"
        thread = threading.Thread(target=_replace, args=(path, record), daemon=True)
        thread.start()
        return thread


@functools.cache
def _signals() -> int:
    """The pipe into which the C handler writes the numbers of signals; a process has one."""
    reading, writing = os.pipe()
    for fd in (reading, writing):
        os.set_blocking(fd, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    signal.signal(signal.SIGUSR2, lambda *_: None)
    return reading


def _replace(path: Path, record: dict) -> None:
    """Write a file whole or not at all, without waiting for the disk."""
    temporary = path.with_name(f".{path.name}.{threading.get_ident()}.tmp")
    try:
        path.parent.mkdir(exist_ok=True)
        temporary.write_text(json.dumps(record) + "\n", encoding="utf-8")
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def _frames(frames: Iterable) -> list[str]:
    """``file:line function`` of each frame; paths inside this repository are relative to it."""

    def name(frame) -> str:
        file = Path(frame.f_code.co_filename)
        return str(file.relative_to(REPO) if file.is_relative_to(REPO) else file)

    return [f"{name(frame)}:{line} {frame.f_code.co_name}" for frame, line in frames]


def _threads(raised: list[str] | None) -> list[dict]:
    """The stacks of all threads but the caller's, the main thread's first.

    Args:
        raised: frames at which the main thread raised, if it is handling an exception.
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main, own = threading.main_thread().ident, threading.get_ident()
    stacks = sorted(sys._current_frames().items(), key=lambda item: item[0] != main)
    return [
        {
            # Threads of C++, such as autograd's, have no name in Python.
            "name": names.get(ident, f"thread {ident}"),
            "frames": raised if raised and ident == main else _frames(traceback.walk_stack(frame)),
        }
        for ident, frame in stacks
        if ident != own
    ]


def _entries() -> list[dict] | None:
    """The entries of torch's flight recorders in the order of time; None without a recorder."""
    entries, recorded = [], False
    # Gloo and NCCL have one each; NCCL's is only in builds with CUDA.
    for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):
        with contextlib.suppress(AttributeError, RuntimeError, ValueError, KeyError):
            entries += json.loads(getattr(c10d, name)())["entries"]
            recorded = True
    return sorted(entries, key=lambda entry: entry["time_created_ns"]) if recorded else None


def _failed_entry(entries: list[dict], phase: str) -> dict | None:
    """The entry of the collective that raised: the last one of the thread that was in ``phase``."""
    # A save has a thread and a group of its own.
    saving = [e for e in entries if e["process_group"][1] == "checkpoint"]
    training = [e for e in entries if e["process_group"][1] != "checkpoint"]
    candidates = saving if saving and "checkpoint" in phase else training
    return candidates[-1] if candidates else None


def _collective(entry: dict, failed: bool) -> dict:
    """An entry of the flight recorder as the post-mortem has it."""
    state = "completed" if entry["retired"] else entry["state"]
    return {
        "group": entry["process_group"][0],
        "op": entry["profiling_name"],
        "number": entry["p2p_seq_id" if entry["is_p2p"] else "collective_seq_id"],
        "p2p": entry["is_p2p"],
        "state": "failed" if failed else state,
        "sizes": [entry["input_sizes"], entry["output_sizes"]],
        "dtypes": entry["input_dtypes"],
        "time": entry["time_created_ns"] / 1e9,
    }


def _collectives(mesh: DeviceMesh, failed: bool, phase: str) -> tuple[list[dict] | None, dict]:
    """The last collectives of this rank, oldest first, and their groups.

    Args:
        failed: the last one has failed. The recorder takes a failure for an end like any other.
        phase: of the training.

    Returns:
        The collectives (None: not recorded), and for each group its ``dim``, its global ``ranks``
        and the number of its ``last`` collective.
    """
    entries = _entries()
    if entries is None:
        return None, {}
    failure = _failed_entry(entries, phase) if failed else None
    by_group, groups, chosen = {}, {}, []
    for order, entry in enumerate(entries):
        collective = _collective(entry, entry is failure)
        by_group.setdefault(tuple(entry["process_group"]), []).append((order, collective))
    for (name, description), ordered in by_group.items():
        unfinished = [pair for pair in ordered if pair[1]["state"] != "completed"]
        oldest = unfinished[:OLDEST_UNFINISHED]
        chosen += oldest + [pair for pair in ordered[-NEWEST:] if pair not in oldest]
        numbers = [collective["number"] for _, collective in ordered if not collective["p2p"]]
        groups[name] = {
            "dim": _dim(mesh, name, description),
            "ranks": _members(name),
            "last": max(numbers, default=0),
        }
    return [collective for _, collective in sorted(chosen, key=lambda pair: pair[0])], groups


def _dim(mesh: DeviceMesh, name: str, description: str) -> str:
    """The mesh dim of a group, or what else it is for."""
    if description != "default_pg":
        return description.removeprefix("mesh_")
    # A dim over all ranks has no group of its own.
    dims = [dim for dim in mesh.mesh_dim_names if mesh.get_group(dim).group_name == name]
    return " and ".join([*dims, "world"])


def _members(name: str) -> str | None:
    """The global ranks of a group; None if torch does not say."""
    with contextlib.suppress(RuntimeError, ValueError, KeyError):
        return rank_ranges(dist.get_process_group_ranks(_resolve_process_group(name)))
    return None
