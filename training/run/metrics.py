"""What is measured: speed, FLOPs and their peak, memory."""

import contextlib
import math
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from models.config import flops_per_token
from parallel.layout import Layout
from training.config.schema import Config

# Dense bfloat16 tensor-core peak in FLOP/s of one device, by a word of its name. Datasheets that
# state only the figure with 2:4 sparsity are halved.
DEVICE_PEAK_FLOPS: dict[str, float] = {
    "B200": 2250e12,  # NVIDIA DGX B200 datasheet: 72 PFLOPS sparse FP8 over 8 GPUs, BF16 is half
    "H200 NVL": 835.5e12,  # NVIDIA H200 datasheet: 1,671 TFLOPS sparse
    "H200": 989.4e12,  # NVIDIA H200 datasheet (SXM): 1,979 TFLOPS sparse
    "H100 NVL": 835.5e12,  # NVIDIA H100 datasheet: 1,671 TFLOPS sparse
    "H100 PCIe": 756.5e12,  # NVIDIA H100 datasheet: 1,513 TFLOPS sparse
    "H100": 989.4e12,  # NVIDIA H100 datasheet (SXM): 1,979 TFLOPS sparse
    "A100": 312e12,  # NVIDIA A100 datasheet
    "L40S": 362.05e12,  # NVIDIA L40S datasheet
    "MI300X": 1307.4e12,  # AMD Instinct MI300X datasheet
}


def peak_flops(device_name: str, dtype: str) -> float | None:
    """Peak FLOP/s of a device of ``torch.cuda.get_device_name``; None where it is not known.

    Only bfloat16 is known, and only for whole devices, not for a part of one (MIG).
    """
    if dtype != "bfloat16" or re.search(r"\bMIG\b", device_name):
        return None
    for word in sorted(DEVICE_PEAK_FLOPS, key=len, reverse=True):
        # Whole words: an RTX A1000 is not an A100.
        if re.search(rf"(?<!\w){word}(?!\w)", device_name):
            return DEVICE_PEAK_FLOPS[word]
    return None


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


def make_record(
    *,
    step: int,
    loss: float | None,
    grad_norm: float | None,
    lr: float,
    tokens: int,
    skipped_steps: int,
    tokens_in_window: int,
    seconds_in_window: float,
    steps_in_window: int,
    data_seconds: float,
    update_seconds: float,
    world_size: int,
    flops_per_token: int,
    peak_flops: float | None,
    peak_memory_bytes: int | None,
) -> dict:
    """One line of metrics.jsonl.

    The window is the steps since the last logged one: ``tokens_in_window`` over all ranks, and the
    seconds of rank 0 (``data_seconds``: waited for data; ``update_seconds``: from the end of the
    backward to that of the update). ``step_s``, ``data_s`` and ``update_s`` are per step,
    ``tflops_per_device`` is in 1e12 FLOP/s, ``mfu`` a fraction, null for an unknown peak.
    ``loss`` and ``grad_norm`` are null where the step was skipped; a number that is not finite is
    null too, and named in ``non_finite``.
    """
    tokens_per_s = tokens_in_window / max(seconds_in_window, 1e-9)
    flops_per_device = tokens_per_s * flops_per_token / world_size
    record = {
        "step": step,
        "loss": loss,
        "grad_norm": grad_norm,
        "lr": lr,
        "tokens": tokens,
        "skipped_steps": skipped_steps,
        "tokens_per_s": tokens_per_s,
        "tokens_per_s_per_device": tokens_per_s / world_size,
        "step_s": seconds_in_window / steps_in_window,
        "data_s": data_seconds / steps_in_window,
        "update_s": update_seconds / steps_in_window,
        "mfu": flops_per_device / peak_flops if peak_flops else None,
        "tflops_per_device": flops_per_device / 1e12,
        "peak_memory_bytes": peak_memory_bytes,
        "time": time.time(),
    }
    return finite(record)


class Meter:
    """Times the steps since the last logged one, and turns them into a record."""

    def __init__(self, config: Config, layout: Layout, device: torch.device):
        cuda = device.type == "cuda"
        self._memory, self._cuda = PeakMemory(device), cuda
        self._constants = {
            "world_size": layout.world_size,
            "flops_per_token": flops_per_token(config.model, config.step.seq_len),
            "peak_flops": peak_flops(torch.cuda.get_device_name(device), config.step.dtype)
            if cuda
            else None,
        }
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

    def record(self, *, data_seconds: float, **known) -> dict:
        """The record of the window; ``known`` are the fields that :func:`make_record` is told."""
        return make_record(
            **known,
            data_seconds=data_seconds,
            tokens_in_window=self._tokens,
            seconds_in_window=time.perf_counter() - self._started,
            steps_in_window=self._steps,
            update_seconds=self._update_seconds(),
            **self._constants,
        )
