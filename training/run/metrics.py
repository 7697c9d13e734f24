"""What is measured of a training step: time, tokens, FLOPs, memory."""

import contextlib
import math
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from models.config import flops_per_token
from parallel.layout import Layout
from planner.machine import peak_flops
from training.config.schema import Config


def _status_bytes(field: str) -> int | None:
    """A memory field of Linux's /proc/self/status in bytes."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(field + ":"):
                return 1024 * int(line.split()[1])
    return None


def _lifetime_peak_bytes() -> int | None:
    """Largest resident set since the process began."""
    with contextlib.suppress(ImportError):
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else 1024 * peak
    return None


class PeakMemory:
    """Peak memory of this process on its device (by default CUDA where there is one), in bytes.

    CUDA: the largest sum of allocated tensors since the last reset (``max_memory_allocated``, not
    what the caching allocator has reserved). CPU on Linux: the largest resident set since the last
    reset (``VmHWM``), less the resident set when this object was made; made after the imports and
    before the model, it leaves tensors and the libraries' buffers. Where ``VmHWM`` cannot be reset:
    the rise of the process's lifetime peak since construction. Where that is unknown too: None.
    """

    def __init__(self, device: str | torch.device | None = None):
        self._device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self.reset()
        self._level = (_status_bytes("VmRSS") if self._resettable else _lifetime_peak_bytes()) or 0

    def reset(self) -> None:
        """Start anew from what is in use now."""
        self._resettable = False
        if self._device.type == "cuda":
            if torch.cuda.is_initialized():
                torch.cuda.reset_peak_memory_stats(self._device)
            return
        with contextlib.suppress(OSError):
            # man 5 proc_pid_clear_refs: 5 sets the peak resident set to the current one.
            Path("/proc/self/clear_refs").write_text("5")
            self._resettable = _status_bytes("VmHWM") is not None

    def peak_bytes(self) -> int | None:
        """The peak since the last reset."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        peak = _status_bytes("VmHWM") if self._resettable else _lifetime_peak_bytes()
        return None if peak is None else max(0, peak - self._level)


def finite(record: dict) -> dict:
    """JSON has no NaN: such numbers become null, and ``non_finite`` names their fields."""
    bad = [k for k, v in record.items() if isinstance(v, float) and not math.isfinite(v)]
    return record | dict.fromkeys(bad) | {"non_finite": bad} if bad else record


@dataclass(frozen=True)
class Window:
    """The steps since the last logged one.

    Attributes:
        steps: how many.
        tokens: over all ranks.
        seconds: of rank 0, as the next two.
        data_seconds: waited for data.
        update_seconds: from the end of each backward to that of its update.
        peak_memory_bytes: of the rank with the most; None where it is unknown.
    """

    steps: int
    tokens: int
    seconds: float
    data_seconds: float
    update_seconds: float
    peak_memory_bytes: int | None


@dataclass(frozen=True)
class Work:
    """What a token costs, and what it is spread over.

    Attributes:
        flops_per_token: of the model, forward and backward.
        world_size: devices that share the work.
        peak_flops: FLOP/s of one device at best; None where it is unknown.
    """

    flops_per_token: int
    world_size: int
    peak_flops: float | None


def make_record(
    window: Window,
    work: Work,
    *,
    step: int,
    loss: float | None,
    grad_norm: float | None,
    lr: float,
    tokens: int,
    skipped_steps: int,
) -> dict:
    """One line of metrics.jsonl.

    ``tokens`` and ``skipped_steps`` count from the first step of the run. ``step_s``, ``data_s``
    and ``update_s`` are per step of the window, ``tflops_per_device`` is in 1e12 FLOP/s, ``mfu`` a
    fraction, null for an unknown peak. ``loss`` and ``grad_norm`` are null where the step was
    skipped; a number that is not finite is null too, and named in ``non_finite``.
    """
    tokens_per_s = window.tokens / max(window.seconds, 1e-9)
    flops_per_device = tokens_per_s * work.flops_per_token / work.world_size
    record = {
        "step": step,
        "loss": loss,
        "grad_norm": grad_norm,
        "lr": lr,
        "tokens": tokens,
        "skipped_steps": skipped_steps,
        "tokens_per_s": tokens_per_s,
        "tokens_per_s_per_device": tokens_per_s / work.world_size,
        "step_s": window.seconds / window.steps,
        "data_s": window.data_seconds / window.steps,
        "update_s": window.update_seconds / window.steps,
        "mfu": flops_per_device / work.peak_flops if work.peak_flops else None,
        "tflops_per_device": flops_per_device / 1e12,
        "peak_memory_bytes": window.peak_memory_bytes,
        "time": time.time(),
    }
    return finite(record)


class Meter:
    """Times the steps since the last logged one, and turns them into a record."""

    def __init__(self, config: Config, layout: Layout, device: torch.device):
        self._memory, self._cuda = PeakMemory(device), device.type == "cuda"
        name = torch.cuda.get_device_name(device) if self._cuda else "cpu"
        self._work = Work(
            flops_per_token=flops_per_token(config.model, config.step.seq_len),
            world_size=layout.world_size,
            peak_flops=peak_flops(name, config.step.dtype),
        )
        self.restart()

    def restart(self) -> None:
        """Begin a new window."""
        self._memory.reset()
        self._started = time.perf_counter()
        self._steps = self._tokens = 0
        self._updates = []

    def _now(self):
        """The moment at which the device has done what is queued; on a CPU that is now."""
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def begin_update(self) -> None:
        """The backward of a step is queued: what comes until :meth:`add` is its update."""
        self._updates.append((self._now(), None))

    def add(self, tokens: int) -> None:
        """Count a step of so many tokens over all ranks."""
        self._steps += 1
        self._tokens += tokens
        self._updates[-1] = self._updates[-1][0], self._now()

    def _update_seconds(self) -> float:
        """Of the window; the device has done what was queued."""
        if self._cuda:
            return sum(begin.elapsed_time(end) for begin, end in self._updates) / 1e3
        return sum(end - begin for begin, end in self._updates)

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Leave the time of the block out: evaluation and saving are not training speed."""
        started = time.perf_counter()
        yield
        self._started += time.perf_counter() - started

    def peak_bytes(self) -> int | None:
        """Peak memory of this rank in the window."""
        return self._memory.peak_bytes()

    def record(self, *, data_seconds: float, peak_memory_bytes: int | None, **fields) -> dict:
        """The record of the window; ``fields`` are the keywords of :func:`make_record`."""
        window = Window(
            steps=self._steps,
            tokens=self._tokens,
            seconds=time.perf_counter() - self._started,
            data_seconds=data_seconds,
            update_seconds=self._update_seconds(),
            peak_memory_bytes=peak_memory_bytes,
        )
        return make_record(window, self._work, **fields)
