"""Measures the machine that it runs on: ``python -m recipes.plan --calibrate``."""

import datetime
import os
import re
import socket
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from common.errors import ConfigError
from common.text import columns
from parallel.launch import Launch
from parallel.layout import Layout
from parallel.mesh import Ranks, init_ranks
from planner.machine import Machine, load_machine, table_name, write_calibration
from recipes.plan.fitting import (
    Measured,
    fit_machine,
    measured_machine,
    predictions,
)
from recipes.plan.timings import Calibration
from training.config.schema import Config

# Of the constants, as planner/machine.py explains them.
MEANING = {
    "matmul": "of the best matrix product",
    "half": "of the size that reaches half of it",
    "attention": "of the best matrix product",
    "hbm": "of the memory's bandwidth",
    "link": "of the bandwidth within a node",
    "nic": "of the bandwidth between nodes",
    "latency": "s of a collective",
    "host": "s to queue a block",
    "fixed": "s of a step; stays",
    "overlap": "of the computing, under which transfers hide",
}


def known_machine(gpu: str | None, launch: Launch) -> Machine | None:
    """The table's entry of this device; None if there is none.

    Args:
        gpu: a name of the table, to be taken instead of what the device calls itself.

    Raises:
        ConfigError: if the table has no ``gpu``, or there is no GPU here.
    """
    if gpu and not torch.cuda.is_available():
        raise ConfigError(f"--gpu {gpu}: {socket.gethostname()} has none to measure: leave it out")
    if not gpu and torch.cuda.is_available():
        gpu = table_name(torch.cuda.get_device_name(0))
    if not gpu:
        return None
    several = launch.world_size > launch.local_world_size
    return load_machine(gpu, **({"node": launch.local_world_size} if several else {}))


def _described(ranks: Ranks, measured: Measured) -> Machine:
    """This device by what was measured, its memory divided by the ranks of a CPU."""
    node, name = ranks.launch.local_world_size, "cpu"
    size = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / node
    if ranks.device.type == "cuda":
        size = torch.cuda.get_device_properties(ranks.device).total_memory
        called = torch.cuda.get_device_name(ranks.device).lower()
        name = re.sub(r"[^a-z0-9]+", "-", called).strip("-")
    return measured_machine(name, size / 2**30, node, measured)


def _report(old: Machine, new: Machine, measured: Measured, notes: list[str]) -> list[str]:
    table = [("what", "measured", "predicted", "error")]
    for what, seconds, predicted in predictions(measured, new):
        cells = f"{1e3 * seconds:.3f} ms", f"{1e3 * predicted:.3f} ms"
        table.append((what, *cells, f"{predicted / seconds - 1:+.0%}"))
    constants = [
        (name, f"{before:.3g}", "->", f"{getattr(new.constants, name):.3g}", MEANING[name])
        for name, before in vars(old.constants).items()
    ]
    return [*columns(table), "", *columns(constants), *notes]


def calibrate(
    config: Config, layout: Layout, launch: Launch, file: Path, gpu: str | None = None
) -> None:
    """Measure this machine with a training's shapes, and write its constants.

    Rank 0 prints what was measured beside what the constants predict, and writes.

    Args:
        config: checked; its vocabulary is set.
        file: for ``recipes.plan --calibration``.
        gpu: as of :func:`known_machine`.

    Raises:
        ConfigError: before a process group is built; or if it cannot be written.
    """
    known = known_machine(gpu, launch)
    ranks = init_ranks(launch, layout, config.run.comm_timeout)
    measured = Calibration(config, layout, ranks).run()
    if ranks.rank == 0:
        old = known or _described(ranks, measured)
        fitted, notes = fit_machine(old, measured)
        host, today = socket.gethostname(), datetime.date.today().isoformat()
        count = f"{launch.world_size} rank{'s' if launch.world_size > 1 else ''}"
        new = replace(
            fitted,
            source=f"measured on {host}, {today}, torch {torch.__version__}, {count}",
            compiled=config.memory.compile,
            dtype=config.step.dtype,
        )
        print(f"{new.name}, layout {layout.name}, {new.dtype}; {new.source}\n")
        print("\n".join(_report(old, new, measured, notes)))
        names = ("what", "seconds", "predicted")
        rows = [dict(zip(names, row, strict=True)) for row in predictions(measured, new)]
        write_calibration(file, new, layout=layout.name, measured=rows)
        print(f"written: {file}")
    dist.destroy_process_group()
