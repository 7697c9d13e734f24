"""The memory and time that are planned for a run, and a table of them beside what was measured.

Torch-free.
"""

import statistics
from dataclasses import dataclass

from common.text import bytes_of, columns
from models.config import LlamaConfig
from parallel.layout import Layout
from planner.machine import Machine
from planner.memory import Memory, Options, memory
from planner.report import TIMES
from planner.time import Time, step_time

SHORT = {"gathered": "gathered parameters", "unsharded_gradients": "whole gradients"}


@dataclass(frozen=True)
class Prediction:
    """The formulas' answers for a run.

    Attributes:
        own: bytes that the ranks at rank 0's coordinate in pp hold.
        fullest: of those that hold most.
        time: None where nothing is known of the device.
        constants: where those of the time come from.
        cuda: peaks are measured as tensors, elsewhere as the resident set.
        offloaded: what is stored is not on the device.
    """

    own: Memory
    fullest: Memory
    time: Time | None
    constants: str
    cuda: bool
    offloaded: bool

    def lines(self) -> list[str]:
        """What a run is to hold and take, for its start."""
        # The loss is over when the backward of a block begins: the larger of the two counts.
        smaller = min(("loss", "working"), key=vars(self.fullest).__getitem__)
        items = sorted(vars(self.fullest).items(), key=lambda item: -item[1])
        items = [item for item in items if item[0] != smaller]
        parts = (f"{SHORT.get(name, name)} {bytes_of(n)}" for name, n in items if n)
        size = bytes_of(self.fullest.total)
        memory = f"plan: {size} on the fullest ranks ({', '.join(parts)})"
        if self.time is None:
            return [memory, f"plan: no step time: {self.constants}"]
        parts = (f"{TIMES[name]} {s:.3g} s" for name, s in vars(self.time).items() if s)
        total = f"{self.time.total:.3g} s a step"
        return [memory, f"plan: {total} ({', '.join(parts)}), constants {self.constants}"]

    def beside(self, stored: tuple[int, int], rows: list[dict]) -> list[str]:
        """A table of it beside what was measured, for the end.

        Args:
            stored: bytes that rank 0 stores of parameters, and of optimizer state.
            rows: logged steps; the first, in which much happens once, is left out of the times.
        """
        table: list[tuple[object, ...]] = [("", "planned", "measured")]
        if not self.offloaded:
            planned = self.own.parameters, self.own.optimizer
            names = "parameters of rank 0", "optimizer state of rank 0"
            for name, *sizes in zip(names, planned, stored, strict=True):
                table.append((name, *map(bytes_of, sizes)))
        if peaks := [row["peak_memory_bytes"] for row in rows if row["peak_memory_bytes"]]:
            what = "peak of the fullest rank" + ("" if self.cuda else " (resident set)")
            table.append((what, bytes_of(self.fullest.total), bytes_of(max(peaks))))
        if len(rows) > 1:
            step, update, data = (
                statistics.median(row[name] for row in rows[1:])
                for name in ("step_s", "update_s", "data_s")
            )
            whole, end = (self.time.total, self.time.optimizer) if self.time else (0.0, 0.0)
            for name, seconds, measured in (
                ("forward and backward, with what is sent", whole - end, step - update - data),
                ("gradient norm and update", end, update),
                ("waiting for data", 0.0, data),
                ("whole step", whole, step),
            ):
                expected = f"{seconds:.3g} s" if self.time else "-"
                table.append((name, expected, f"{measured:.3g} s"))
        return columns(table) if len(table) > 1 else []


def predict(
    model: LlamaConfig,
    layout: Layout,
    options: Options,
    machine: Machine | None,
    unknown: str = "",
) -> Prediction:
    """What the formulas say of a run.

    Args:
        model: its vocabulary is set.
        machine: its device; None where nothing is known of it, which ``unknown`` explains.
    """
    stages = layout.stages(model, options.seq_len)
    memories = [
        memory(model, layout, options, [s for s in stages if s.pp_rank == pp_rank])
        for pp_rank in range(layout.pp)
    ]
    time, constants = None, unknown
    if machine:
        time = step_time(model, layout, options, machine, stages)
        constants = machine.source or f"of the table for {machine.name}, not calibrated"
    fullest = max(memories, key=lambda memory: memory.total)
    return Prediction(memories[0], fullest, time, constants, options.cuda, options.cpu_offload)
