"""What a rank leaves of itself when a run hangs or fails: where it was, and in which collective."""

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

# Of each group: a device may have thousands of collectives queued behind the one that is stuck.
OLDEST_UNFINISHED, NEWEST = 5, 10


class Diagnosis:
    """Writes the files of this rank in the ``diagnosis`` folder of a run.

    Nothing here raises, and nothing that may block (a disk that is gone, a device that does not
    answer the recorder) runs in the thread of the caller. From the construction on, a crash of the
    interpreter leaves its stacks in the rank's log, and SIGUSR2 ends nothing.
    """

    def __init__(self, run: RunDir, ranks: Ranks):
        self._run, self._rank, self._mesh = run, ranks.rank, ranks.mesh
        self._error: dict = {}
        with contextlib.suppress(OSError):
            # Kept open by faulthandler, which writes where nothing can be opened any more.
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
        """Remember what the main thread raised; every later file of this rank holds it.

        Args:
            lost_peer: it was raised by a collective that a peer has left.
        """
        try:
            said = masked(str(error))
            text = masked("".join(traceback.format_exception(error)))
        except Exception:  # of an error that cannot say what it is
            said = text = "an error without words"
        frames = [(frame, line) for frame, line in traceback.walk_tb(error.__traceback__)][::-1]
        self._error = {
            "error": f"{type(error).__name__}: {said}"[:2000],
            "lost_peer": lost_peer,
            "traceback": text[-20000:],
            "frames": _frames(frames),
        }

    def calls(self) -> int:
        """How many collectives, sends and receives this rank has begun: more while it moves."""
        total = 0
        for group in list(dist.distributed_c10d._world.pg_map):
            with contextlib.suppress(RuntimeError):
                total += group._get_sequence_number_for_group()
        return total

    def place(self, phase: str) -> dict:
        """Where this rank stands, in a few words, for :mod:`training.run.waiting`."""
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
        """Write the file of this rank, in the thread that is returned, and call ``then``.

        Args:
            request: grows with each request to all ranks; a file with a lower one than others have
                is of a rank that has not answered.
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
        """Write what all ranks last said of themselves, for those that write nothing any more.

        Args:
            request: as in :meth:`write`.
            beats: of every rank its :class:`training.run.heartbeat.Beat`.
        """
        record = {"time": time.time(), "request": request, "beats": beats}
        path = self._run.diagnosis / "beats.json"
        thread = threading.Thread(target=_replace, args=(path, record), daemon=True)
        thread.start()
        return thread


@functools.cache
def _signals() -> int:
    """The pipe in which the numbers of signals arrive; Python has one for a process."""
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
    """``file:line function``, innermost first; files of this repository are relative to it."""

    def name(frame) -> str:
        file = Path(frame.f_code.co_filename)
        return str(file.relative_to(REPO) if file.is_relative_to(REPO) else file)

    return [f"{name(frame)}:{line} {frame.f_code.co_name}" for frame, line in frames]


def _threads(raised: list[str] | None) -> list[dict]:
    """The stacks of all threads but the caller's, the main thread's first.

    Args:
        raised: where the main thread was, if it is handling an error.
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main, own = threading.main_thread().ident, threading.get_ident()
    found = sorted(sys._current_frames().items(), key=lambda item: item[0] != main)
    return [
        {
            # Threads that C++ has made, as autograd's, have no name here.
            "name": names.get(ident, f"thread {ident}"),
            "frames": raised if raised and ident == main else _frames(traceback.walk_stack(frame)),
        }
        for ident, frame in found
        if ident != own
    ]


def _entries() -> list[dict] | None:
    """What torch's flight recorders hold, in the order of time; None if nothing is recorded."""
    found, recorded = [], False
    # Gloo and NCCL have one each; NCCL's is in builds with CUDA only.
    for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):
        with contextlib.suppress(AttributeError, RuntimeError, ValueError, KeyError):
            found += json.loads(getattr(c10d, name)())["entries"]
            recorded = True
    return sorted(found, key=lambda entry: entry["time_created_ns"]) if recorded else None


def _collectives(mesh: DeviceMesh, failed: bool, phase: str) -> tuple[list[dict] | None, dict]:
    """The last collectives of this rank, oldest first, and the groups they are of.

    Args:
        failed: the last one has failed, which the recorder takes for an end like any other.
        phase: of the training; in a checkpoint, it may be one of the thread that saves.

    Returns:
        The collectives (None: not recorded), and for each group its ``dim``, its global ``ranks``
        and the number of its ``last`` collective.
    """
    entries = _entries()
    if entries is None:
        return None, {}
    kept, by_group = [], {}
    # A save goes on in a thread of its own; what has failed is of the training.
    training = [e for e in entries if e["process_group"][1] != "checkpoint"]
    saving = [e for e in entries if e["process_group"][1] == "checkpoint"]
    candidates = saving if saving and "checkpoint" in phase else training
    failure = candidates[-1] if failed and candidates else None
    for order, entry in enumerate(entries):
        name, description = entry["process_group"]
        found = {
            "group": name,
            "op": entry["profiling_name"],
            "number": entry["p2p_seq_id" if entry["is_p2p"] else "collective_seq_id"],
            "p2p": entry["is_p2p"],
            "state": "completed" if entry["retired"] else entry["state"],
            "sizes": [entry["input_sizes"], entry["output_sizes"]],
            "dtypes": entry["input_dtypes"],
            "time": entry["time_created_ns"] / 1e9,
        }
        if entry is failure:
            found["state"] = "failed"
        by_group.setdefault((name, description), []).append((order, found))
    groups = {}
    for (name, description), ordered in by_group.items():
        unfinished = [pair for pair in ordered if pair[1]["state"] != "completed"]
        kept += unfinished[:OLDEST_UNFINISHED]
        kept += [pair for pair in ordered[-NEWEST:] if pair not in unfinished[:OLDEST_UNFINISHED]]
        numbers = [found["number"] for _, found in ordered if not found["p2p"]]
        groups[name] = {
            "dim": _dim(mesh, name, description),
            "ranks": _members(name),
            "last": max(numbers, default=0),
        }
    return [found for _, found in sorted(kept, key=lambda pair: pair[0])], groups


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
