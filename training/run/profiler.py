"""``--profile``: what every rank does in chosen steps, as a trace and a memory snapshot."""

import logging
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from parallel.mesh import Ranks
from training.config.values import step_range
from training.run.directory import LOGGER

# Allocations and releases that a snapshot can hold; a step of a large model has some ten thousand.
MAX_MEMORY_EVENTS = 1_000_000


class Profiler:
    """Records the steps ``first`` to ``last`` on this rank.

    It leaves ``trace-rank-00003.json.gz`` in ``folder``, for chrome://tracing or ui.perfetto.dev,
    with the allocations of the CPU in it; and on CUDA ``memory-rank-00003.pickle``, for
    pytorch.org/memory_viz.
    """

    def __init__(self, steps: str | None, folder: Path, ranks: Ranks):
        """``steps``: of ``--profile``; None: nothing is recorded."""
        self._first, self._last = step_range(steps) if steps else (0, 0)
        self._folder, self._name = folder, f"rank-{ranks.rank:05d}"
        self._cuda = ranks.device.type == "cuda"
        self._profile = None

    def begin(self, step: int) -> None:
        """Called before every step."""
        if self._profile and step > self._last:
            self.stop()
        elif self._first <= step <= self._last and not self._profile:
            activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * self._cuda
            self._profile = profile(activities=activities, profile_memory=True, record_shapes=True)
            if self._cuda:
                torch.cuda.memory._record_memory_history(max_entries=MAX_MEMORY_EVENTS)
            self._profile.start()

    def stop(self) -> None:
        """Write what was recorded, if anything was and has not been written."""
        if not self._profile:
            return
        recorded, self._profile = self._profile, None
        recorded.stop()
        # A full disk is no reason to end a training.
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            recorded.export_chrome_trace(str(self._folder / f"trace-{self._name}.json.gz"))
            if self._cuda:
                torch.cuda.memory._dump_snapshot(str(self._folder / f"memory-{self._name}.pickle"))
        except OSError as error:
            logging.getLogger(LOGGER).warning("--profile: %s", error)
        if self._cuda:
            torch.cuda.memory._record_memory_history(enabled=None)
