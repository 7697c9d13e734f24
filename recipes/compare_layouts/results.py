"""Finished run directories of train_llm.py, as a comparison reads them."""

import dataclasses
import json
import math
import tomllib
from dataclasses import dataclass
from pathlib import Path

from common.errors import ConfigError, LayoutError
from common.files import read_bounded, read_json
from parallel.layout import Layout, parse_layout
from recipes.compare_layouts.judge import QUANTITIES, Lossy
from training.config.options import config_layout
from training.config.schema import Config
from training.run.directory import RunDir

MAX_METRICS_BYTES = 1 << 30


@dataclass(frozen=True)
class Run:
    """A finished run.

    Attributes:
        label: its name in the comparison.
        start: the record of its last start in run.json, and the ``first_command``.
        rows: of metrics.jsonl.
    """

    label: str
    path: Path
    config: Config
    layout: Layout
    start: dict
    rows: list[dict]

    @property
    def lossy(self) -> Lossy | None:
        """What its gradient compression loses; None on one process, which sends nothing."""
        compression, ranks = self.config.memory.grad_compression, self.layout.world_size
        return Lossy(compression, ranks) if compression != "none" and ranks > 1 else None


def steps_done(path: Path) -> int:
    """Optimizer steps of a run that has finished; 0 if it has not."""
    status = RunDir(path).read_status() or {}
    return status.get("step", 0) if status.get("state") == "finished" else 0


def _checked_row(row: dict) -> dict:
    """A row of metrics.jsonl that has the numbers that are compared.

    Raises:
        ValueError: if one is missing, or no number.
    """
    for name in ("step", "tokens", "tokens_per_s", *QUANTITIES, "peak_memory_bytes"):
        value, optional = row[name], name in (*QUANTITIES, "peak_memory_bytes")
        number = isinstance(value, int | float) and math.isfinite(value)
        if not number and not (optional and value is None):
            raise ValueError(f"metrics.jsonl: {name} is {value!r}")
    return row


def read_run(path: Path) -> Run:
    """Read a finished run, labelled with its layout, which is that of the last start.

    Raises:
        ConfigError: in one line, if it is no run, has not finished, or cannot be read.
    """
    files = RunDir(path)
    status = files.read_status()
    if status is None:
        raise ConfigError(f"{path} is no run directory of train_llm.py: it has no status.json")
    if not steps_done(path):
        raise ConfigError(
            f"{path} has not finished (its status is {status.get('state')}): "
            "start its command again, or leave it out"
        )
    try:
        starts = read_json(files.run_json)["starts"]
        # The first start decided the initial weights; everything else is of the last one.
        start = starts[-1] | {"first_command": starts[0].get("command", [])}
        lines = read_bounded(files.metrics_jsonl, MAX_METRICS_BYTES).splitlines()
        rows = [_checked_row(json.loads(line)) for line in lines]
        config = Config(**tomllib.loads(files.config_toml.read_text("utf-8")))
        sizes = parse_layout(start["layout"])
        world_size = math.prod(sizes.values())
        del sizes["dp"]
        # The last start may have had another layout than the first, whose config is kept.
        changed = config.layout.model_copy(update=sizes)
        layout = config_layout(config.model_copy(update={"layout": changed}), world_size)
    except (OSError, ValueError, LookupError, TypeError, ConfigError, LayoutError) as error:
        raise ConfigError(f"{path} cannot be read ({type(error).__name__}: {error})") from None
    if not rows:
        raise ConfigError(f"{path} has no logged step in metrics.jsonl")
    return Run(layout.name, path, config, layout, start, rows)


def read_runs(paths: list[Path], out: Path | None) -> list[Run]:
    """The runs in ``paths``, or where there are none the finished ones in ``out``.

    Each has a label of its own: that of runs on the same layout has the path in it.

    Raises:
        ConfigError: if there is none, or a named one has not finished.
    """
    if not paths:
        folders = sorted((file.parent for file in out.glob("*/run.json")), key=_order)
        for folder in folders:
            if steps_done(folder):
                paths = [*paths, folder]
            else:
                print(f"note: {folder} has not finished and is left out")
        if not paths:
            raise ConfigError(f"--out {out} holds no finished run")
    runs = [read_run(path) for path in dict.fromkeys(paths)]
    names = [run.label for run in runs]
    return [
        dataclasses.replace(run, label=f"{run.label} {run.path}")
        if names.count(run.label) > 1
        else run
        for run in runs
    ]


def _order(path: Path) -> tuple:
    """Layouts by their sizes, other names after them."""
    try:
        return (0, *parse_layout(path.name).values())
    except LayoutError:
        return (1, path.name)
