"""What a comparison of layouts says: comparison.json, a table, loss_curves.png, a run on wandb.

All of it is made from run directories of ``train_llm.py``, so that it can be made again any time.
Losses are in nats per token; a deviation is |a-b|/|b| against the reference run b, per step.
"""

import contextlib
import io
import json
import math
import statistics
import sys
import textwrap
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from common.errors import ConfigError, LayoutError
from common.files import read_bounded, read_json
from common.text import printable
from parallel.layout import Layout, make_layout, parse_layout
from planner.collectives import collectives
from recipes.compare_layouts.differences import (
    OF_A_TRAINING,
    differing_flags,
    excess,
    labels,
    shown_flags,
    statement,
)
from training.config.schema import Config
from training.run.directory import RunDir
from training.run.wandb_run import wandb_key_configured, wandb_project

if TYPE_CHECKING:
    from recipes.compare_layouts.judge import Lossy

QUANTITIES = ("loss", "grad_norm")
NAMES = ("loss", "grad norm")
# Dashes and markers tell the lines apart where their lightness does not.
DASHES = (
    "-",
    (0, (6, 2)),
    (0, (1, 1.5)),
    (0, (7, 2, 1.5, 2)),
    (0, (3, 2)),
    (0, (5, 1, 1, 1, 1, 1)),
)
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
TITLE_WIDTH = 120  # characters of a line
PRECISIONS = ("bfloat16", "float32", "float64")


@dataclass(frozen=True)
class Run:
    """A finished run: its label, how it was laid out, and the rows of its metrics.jsonl."""

    label: str
    path: Path
    config: Config
    layout: Layout
    start: dict
    rows: list[dict]


def steps_done(path: Path) -> int:
    """Optimizer steps of a run that has finished; 0 if it has not."""
    status = RunDir(path).read_status() or {}
    return status.get("step", 0) if status.get("state") == "finished" else 0


def _checked_row(row: dict) -> dict:
    """A row of metrics.jsonl with the numbers that are compared.

    Raises:
        ValueError: if one is missing, or none.
    """
    for name in ("step", "tokens", "tokens_per_s", *QUANTITIES, "peak_memory_bytes"):
        value, optional = row[name], name in (*QUANTITIES, "peak_memory_bytes")
        number = isinstance(value, int | float) and math.isfinite(value)
        if not number and not (optional and value is None):
            raise ValueError(f"metrics.jsonl: {name} is {value!r}")
    return row


def read_run(path: Path, label: str | None = None) -> Run:
    """Read a finished run; the layout is that of its last start.

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
        # The first start has decided about the initial weights; all else is of the last one.
        start = starts[-1] | {"first_command": starts[0].get("command", [])}
        lines = read_bounded(files.metrics_jsonl, 1 << 30).splitlines()
        rows = [_checked_row(json.loads(line)) for line in lines]
        config = Config(**tomllib.loads(files.config_toml.read_text("utf-8")))
        sizes = parse_layout(start["layout"])
        layout = make_layout(
            world_size=math.prod(sizes.values()),
            pp=sizes["pp"],
            pp_schedule=config.layout.pp_schedule,
            tp=sizes["tp"],
            cp=sizes["cp"],
            dp_replicate=sizes["dp_replicate"],
            zero=config.layout.zero,
            global_batch_size=config.step.global_batch_size,
            batch_size=config.step.batch_size,
        )
    except (OSError, ValueError, LookupError, TypeError, ConfigError, LayoutError) as error:
        raise ConfigError(f"{path} cannot be read ({type(error).__name__}: {error})") from None
    if not rows:
        raise ConfigError(f"{path} has no logged step in metrics.jsonl")
    return Run(label or layout.name, path, config, layout, start, rows)


def deviations(run: list[dict], reference: list[dict], quantity: str) -> tuple[list, list]:
    """Steps at which both runs have the number, and |a-b|/|b| there (1 if only b is zero)."""
    known = {row["step"]: row[quantity] for row in reference if row[quantity] is not None}
    steps, values = [], []
    for row in run:
        a, b = row[quantity], known.get(row["step"])
        if a is not None and b is not None:
            steps.append(row["step"])
            values.append(abs(a - b) / (abs(b) or abs(a) or 1.0))
    return steps, values


def bytes_per_step(run: Run) -> int:
    """Bytes of all tensors that a rank communicates in an optimizer step, each counted whole.

    In a pipeline, those of the rank with most.
    """
    options = run.config.plan_options(cuda=run.start.get("device", "cpu") != "cpu")
    model, seq_len = run.config.model, run.config.step.seq_len
    totals = []
    for pp_rank in range(run.layout.pp):
        stages = run.layout.rank_stages(model, seq_len, pp_rank)
        sent = collectives(model, run.layout, stages=stages, seq_len=seq_len, **options)
        totals.append(sum(c.count * c.units * c.bytes for c in sent))
    return max(totals)


def lossy(run: Run) -> "Lossy | None":
    """What a run loses on purpose; None on one process, which sends nothing."""
    from recipes.compare_layouts.judge import Lossy

    compression, ranks = run.config.memory.grad_compression, run.layout.world_size
    return Lossy(compression, ranks) if compression != "none" and ranks > 1 else None


def _describe(run: Run, reference: Run | None) -> dict:
    """One layout of comparison.json."""
    steps, curves, largest = [row["step"] for row in run.rows], {}, {}
    for quantity in QUANTITIES if reference else ():
        at, values = deviations(run.rows, reference.rows, quantity)
        curves[quantity] = {"step": at, "value": values}
        # The first step with the largest deviation; None without a step in common.
        worst = max(zip(values, at, strict=True), key=lambda pair: pair[0], default=None)
        largest[quantity] = worst and {"value": worst[0], "step": worst[1]}
    peaks = [row["peak_memory_bytes"] for row in run.rows if row["peak_memory_bytes"] is not None]
    return {
        "label": run.label,
        "layout": run.layout.name,
        "run_dir": str(run.path),
        "dtype": run.config.step.dtype,
        "grad_compression": lost.compression if (lost := lossy(run)) else "none",
        "global_batch_size": run.config.step.global_batch_size,
        "batch_size": run.layout.batch_size,
        "micro_batches": run.layout.micro_batches,
        "curve": {"step": steps}
        | {name: [row[name] for row in run.rows] for name in ("tokens", *QUANTITIES)},
        "final_loss": run.rows[-1]["loss"],
        "deviation": curves or None,
        "max_deviation": largest or None,
        "tokens_per_s": statistics.median(row["tokens_per_s"] for row in run.rows),
        "peak_memory_bytes": max(peaks, default=None),
        "bytes_per_step": bytes_per_step(run),
        "flags": run.start.get("command", [])[1:],
        "versions": {"python": run.start.get("python"), **run.start.get("versions", {})},
        "git_commit": run.start.get("git_commit"),
        "device": run.start.get("device"),
    }


def _first_above(curve: dict, steps: list[int], bound: list[float]) -> int | None:
    """The first step at which a deviation is above the bound."""
    bounds = dict(zip(steps, bound, strict=True))
    over = (x for x, value in zip(curve["step"], curve["value"], strict=True) if value > bounds[x])
    return next(over, None)


def build_comparison(runs: list[Run], reference: Run, flags: list[str]) -> dict:
    """comparison.json, with the rounding bound of the dtype with the fewest digits.

    Where gradients are compressed, the bound is at least that of the compression. Runs of other
    data, models or global batches are not the same training: they have no deviations.
    """
    import numpy as np

    from recipes.compare_layouts.judge import rounding_bound

    differing = differing_flags(runs)
    compared = not OF_A_TRAINING & differing.keys()
    steps = sorted({row["step"] for run in runs for row in run.rows})
    dtype = min((run.config.step.dtype for run in runs), key=PRECISIONS.index)
    bound = {q: rounding_bound(dtype, np.array(steps), q).tolist() for q in QUANTITIES}
    losses = [lost for run in runs if (lost := lossy(run))]
    for quantity, values in bound.items():
        bound[quantity] = [
            max(value, *(lost.bound(step, quantity) for lost in losses)) if losses else value
            for step, value in zip(steps, values, strict=True)
        ]
    entries = [_describe(run, reference if compared else None) for run in runs]
    for entry in entries:
        entry["above_bound"] = compared and {
            quantity: _first_above(entry["deviation"][quantity], steps, bound[quantity])
            for quantity in QUANTITIES
        }
    return {
        "recipe": " and ".join(dict.fromkeys(Path(run.config.recipe).stem for run in runs)),
        "reference": reference.label if compared else None,
        "global_batches_differ": "--global-batch-size" in differing,
        "differing_flags": differing,
        "dtype": dtype,
        "grad_compressions": sorted({lost.compression for lost in losses}),
        "rounding_bound": {"step": steps} | bound,
        "flags": flags,
        "layouts": entries,
    }


def table_rows(comparison: dict) -> tuple[list[str], list[list[str]]]:
    """Headers and cells of the table, as text."""
    base, judged = comparison["reference"], "verdict" in comparison
    differing, shown = comparison["differing_flags"], shown_flags(comparison)
    headers = ["layout", *(_column(name) for name in shown), "final loss\nnats/token"]
    headers += [f"max {name} deviation\nrelative @step" for name in NAMES] if base else []
    headers += ["tokens/s", "peak memory\nMiB per rank", "communicated\nMB per step and rank"]
    verdicts = {v["layout"]: v for v in comparison.get("verdict", ())}
    rows = []
    for i, entry in enumerate(comparison["layouts"]):
        cells = [entry["label"], *(printable(str(differing[name][i])) for name in shown)]
        cells.append("none" if entry["final_loss"] is None else f"{entry['final_loss']:.6f}")
        if "--steps" in differing:
            cells[-1] += f" @{entry['curve']['step'][-1]}"
        for quantity in QUANTITIES if base else ():
            cells.append(_deviation_cell(entry, quantity))
            if entry["label"] == base:
                cells[-1] = "reference"
        peak = entry["peak_memory_bytes"]
        cells.append(f"{entry['tokens_per_s']:,.0f}")
        cells.append("unknown" if peak is None else f"{peak / 2**20:,.0f}")
        cells.append(f"{entry['bytes_per_step'] / 1e6:,.1f}")
        if judged:
            cells.append(_verdict_cell(verdicts.get(entry["label"])))
        rows.append(cells)
    return headers + (["verdict"] if judged else []), rows


def _column(name: str) -> str:
    return "global\nbatch" if name == "--global-batch-size" else name.removeprefix("--")


def _deviation_cell(entry: dict, quantity: str) -> str:
    largest, above = entry["max_deviation"][quantity], entry["above_bound"][quantity]
    if not largest:
        return "none"
    if not largest["value"]:
        return "0 (equal)"
    over = "" if above is None else f", above bound from {above}"
    return f"{largest['value']:.1e} @{largest['step']}{over}"


def _verdict_cell(verdict: dict | None) -> str:
    if verdict is None:
        return "reference"
    if verdict["finding"]:
        return "BUG"
    return "rounding" if verdict["bound"] is None else "lossy"


def print_table(comparison: dict, stream: TextIO | None = None) -> None:
    """Print the table: no control characters, and never cut, however narrow the terminal."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    headers, rows = table_rows(comparison)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for i, header in enumerate(headers):
        table.add_column(header, justify="right" if i else "left", no_wrap=True)
    for cells in rows:
        table.add_row(*cells)
    # Without a colour system nothing but text is written; a narrow terminal wraps lines itself.
    console = Console(file=io.StringIO(), width=1000, color_system=None, force_terminal=False)
    console.print(table)
    lines = [line.rstrip() for line in console.file.getvalue().splitlines()]
    stream = stream or sys.stdout
    text = "\n".join(line for line in lines if line)
    try:
        text.encode(getattr(stream, "encoding", None) or "utf-8")
    except UnicodeEncodeError:
        text = text.replace("─", "-")
    print(text, file=stream, flush=True)


def draw(comparison: dict, path: Path) -> None:
    """Write the picture, 1600 x 1000 pixels."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12.8, 8.0), dpi=125, layout="constrained")
    FigureCanvasAgg(figure)
    compared = comparison["reference"] is not None and len(comparison["layouts"]) > 1
    axes = figure.subplots(2 if compared else 1, 2, squeeze=False)
    if not compared:
        _draw_curves(axes[0][0], comparison, "step", "loss")
        _draw_curves(axes[0][1], comparison, "tokens", "loss")
    else:
        for column, quantity in enumerate(QUANTITIES):
            _draw_curves(axes[0][column], comparison, "step", quantity)
            _draw_deviations(axes[1][column], comparison, quantity)
    # All panels have the same lines; the deviations add the bound.
    lines, names = axes[0][0].get_legend_handles_labels()
    if compared:
        extra, words = axes[1][0].get_legend_handles_labels()
        lines, names = lines + extra[-1:], names + words[-1:]
    # Long names would push the picture together.
    columns = max(1, min(6, 150 // (12 + max(map(len, names)))))
    place = {"loc": "outside lower center", "ncols": columns}
    figure.legend(lines, names, frameon=False, handlelength=5, **place)
    figure.suptitle(_title(comparison), fontsize=13)
    figure.savefig(path)


def _title(comparison: dict) -> str:
    differing, entries = comparison["differing_flags"], comparison["layouts"]
    lengths = sorted({entry["curve"]["step"][-1] for entry in entries})
    facts = [comparison["recipe"]]
    if "--dtype" not in differing:
        facts.append(comparison["dtype"])
    facts.append(f"{' to '.join(map(str, [*lengths[:1], *lengths[1:][-1:]]))} steps")
    if "--global-batch-size" not in differing:
        facts.append(f"global batch {entries[0]['global_batch_size']} sequences")
    lines = [", ".join(facts), statement(comparison)]
    lines = lines if differing else [": ".join(lines)]
    bugs = [v["layout"] for v in comparison.get("verdict", ()) if v["finding"]]
    more = [excess(comparison), f"bug by the float64 verdict: {', '.join(bugs)}" if bugs else None]
    return "\n".join(textwrap.fill(line, TITLE_WIDTH) for line in [*lines, *filter(None, more)])


def _styles(comparison: dict) -> list[dict]:
    """A style per layout, in order: dash, marker, and lightness from dark to light."""
    from matplotlib import colormaps

    count = len(comparison["layouts"])
    # Equal curves lie on each other: the first is the widest, and shows on both sides.
    wider = 0.0 if comparison["reference"] is None else 3.0 / max(1, count - 1)
    return [
        {
            "linestyle": DASHES[i % len(DASHES)],
            "marker": MARKERS[i % len(MARKERS)],
            "color": colormaps["viridis"](0.85 * i / max(1, count - 1)),
            "linewidth": 1.5 + wider * (count - 1 - i),
            "markersize": 5.5,
            "zorder": 2 + i / count,
        }
        for i in range(count)
    ]


def _marked(points: int, i: int, count: int) -> tuple[int, int]:
    """Where line i of ``count`` has its markers: about eight, and not where the others have."""
    every = max(1, points // 8)
    return (i * every // count) % every, every


def _draw_curves(axis, comparison: dict, x: str, quantity: str) -> None:
    """Loss or gradient norm over steps or tokens, a line per layout."""
    from matplotlib.ticker import EngFormatter

    layouts, names = comparison["layouts"], labels(comparison)
    for i, (entry, style) in enumerate(zip(layouts, _styles(comparison), strict=True)):
        label, curve = names[i], entry["curve"]
        values = [math.nan if value is None else value for value in curve[quantity]]
        marks = _marked(len(values), i, len(layouts))
        axis.plot(curve[x], values, label=label, markevery=marks, **style)
    if x == "tokens":
        axis.xaxis.set_major_formatter(EngFormatter(sep=""))
        axis.set_xlabel("tokens")
    else:
        _step_axis(axis)
    axis.set_ylabel("loss (nats per token)" if quantity == "loss" else "gradient norm")
    axis.grid(alpha=0.3)


def _step_axis(axis) -> None:
    from matplotlib.ticker import MaxNLocator

    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.set_xlabel("optimizer step")


def _draw_deviations(axis, comparison: dict, quantity: str) -> None:
    """Deviation from the reference on a log scale; equal numbers lie on the floor, marked 0."""
    base, bound = comparison["reference"], comparison["rounding_bound"]
    curves = [entry["deviation"][quantity] for entry in comparison["layouts"]]
    positive = [value for curve in curves for value in curve["value"] if value]
    positive += [value for value in bound[quantity] if value]
    floor = 10.0 ** (math.floor(math.log10(min(positive, default=1e-16))) - 1)
    for i, (curve, style) in enumerate(zip(curves, _styles(comparison), strict=True)):
        if comparison["layouts"][i]["label"] != base:
            values = [max(value, floor) for value in curve["value"]]
            marks = _marked(len(values), i, len(curves))
            axis.plot(curve["step"], values, markevery=marks, **style | {"linewidth": 1.2})
    label = " and ".join([comparison["dtype"], *comparison["grad_compressions"]])
    label = f"rounding bound of {label}"
    axis.plot(bound["step"], bound[quantity], "--", color="black", linewidth=1.5, label=label)
    axis.set_yscale("log")
    axis.set_ylim(floor / 2, 5 * max(positive, default=1e-15))
    decades = round(math.log10(max(positive, default=1e-15) / floor))
    ticks = [floor * 10.0**i for i in range(0, decades + 2, max(1, decades // 6))]
    names = [f"$10^{{{round(math.log10(tick))}}}$" for tick in ticks]
    axis.set_yticks(ticks, ["0", *names[1:]], minor=False)
    axis.minorticks_off()
    axis.axhline(floor, color="black", linewidth=0.6)
    _step_axis(axis)
    name = NAMES[QUANTITIES.index(quantity)]
    # A longer name would not fit there; the legend says which one it is.
    whose = base if base in labels(comparison) else "the reference"
    axis.set_ylabel(f"{name}: relative deviation from {whose}")
    axis.grid(alpha=0.3)


def log_to_wandb(
    comparison: dict, picture: Path, out: Path, mode: str, project: str | None
) -> None:
    """One run on wandb with the table and the picture; what goes wrong there costs only that run.

    ``mode`` is train_llm.py's ``--wandb``. The run is named after the comparison, and its group is
    that of the training runs.
    """
    online = mode == "online" or (mode == "auto" and wandb_key_configured())
    for attempt in ("online", "offline") if online else ("offline",):
        try:
            # wandb prompts only where stderr is a terminal, and speaks before it reads silent.
            with contextlib.redirect_stderr(io.StringIO()):
                where = _wandb_run(comparison, picture, out, attempt, project)
            print(f"wandb: {where}", flush=True)
            return
        except Exception as error:
            # The message may hold the server's answer, and that the key: the type is enough.
            print(f"wandb: {attempt} failed ({type(error).__name__})", flush=True)
            with contextlib.suppress(Exception):
                sys.modules["wandb"].teardown(exit_code=1)


def _wandb_run(comparison: dict, picture: Path, out: Path, mode: str, project: str | None) -> str:
    import wandb

    name, (headers, rows) = out.resolve().name, table_rows(comparison)
    quiet = {"console": "off", "silent": True, "init_timeout": 30, "finish_timeout": 60}
    private = {"disable_code": True, "disable_git": True, "save_code": False}
    run = wandb.init(
        mode=mode,
        project=wandb_project(project),
        name=name,
        group=name,
        job_type="comparison",
        dir=out,
        config={key: comparison[key] for key in ("recipe", "reference", "dtype", "flags")},
        settings=wandb.Settings(**quiet, **private, reinit="create_new"),
    )
    columns = [header.replace("\n", " ").strip() for header in headers]
    table = wandb.Table(columns=columns, data=rows)
    run.log({"comparison": table, "loss_curves": wandb.Image(str(picture))})
    where = f"offline, upload with: wandb sync {Path(run.dir).parent}"
    where = where if mode == "offline" else run.url
    run.finish()
    return where
