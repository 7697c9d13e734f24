"""What a comparison says in text: a table, the verdicts, and a run on wandb."""

import contextlib
import io
import sys
from pathlib import Path
from typing import TextIO

from common.text import columns, printable
from recipes.compare_layouts.differences import shown_flags
from recipes.compare_layouts.judge import QUANTITIES, Verdict
from training.run.wandb_run import wandb_key_configured, wandb_project


def table_rows(comparison: dict) -> tuple[list[str], list[list[str]]]:
    """Headers, of one or two lines, and cells of the table, as text."""
    base, judged = comparison["reference"], "verdict" in comparison
    shown = shown_flags(comparison)
    headers = ["layout", *map(_flag_header, shown), "final loss\nnats/token"]
    for quantity in QUANTITIES if base else ():
        headers.append(f"max {quantity.replace('_', ' ')} deviation\nrelative @step")
    headers += ["tokens/s", "peak memory\nMiB per rank", "communicated\nMB per step and rank"]
    verdicts = {v["layout"]: v for v in comparison.get("verdict", ())}
    rows = []
    for i, entry in enumerate(comparison["layouts"]):
        values = [str(comparison["differing_flags"][name][i]) for name in shown]
        loss = "none" if entry["final_loss"] is None else f"{entry['final_loss']:.6f}"
        if "--steps" in comparison["differing_flags"]:
            loss += f" @{entry['curve']['step'][-1]}"
        deviations = [_deviation_cell(entry, quantity) for quantity in QUANTITIES if base]
        if entry["label"] == base:
            deviations = ["reference"] * len(QUANTITIES)
        peak = entry["peak_memory_bytes"]
        cells = [
            *map(printable, [entry["label"], *values]),
            loss,
            *deviations,
            f"{entry['tokens_per_s']:,.0f}",
            "unknown" if peak is None else f"{peak / 2**20:,.0f}",
            f"{entry['bytes_per_step'] / 1e6:,.1f}",
        ]
        rows.append([*cells, _verdict_cell(verdicts.get(entry["label"]))] if judged else cells)
    return headers + (["verdict"] if judged else []), rows


def _flag_header(name: str) -> str:
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
    """Print the table, with whole lines however narrow the terminal is."""
    headers, rows = table_rows(comparison)
    split = [header.rpartition("\n") for header in headers]
    top, bottom = [above for above, _, _ in split], [below for _, _, below in split]
    print("\n".join(columns([top, bottom, *rows])), file=stream or sys.stdout, flush=True)


def verdict_line(verdict: Verdict, compression: str) -> str:
    """A verdict in words; ``compression`` is the --grad-compression of the run."""
    deviation = f"largest float64 deviation {verdict.deviation:.1e}"
    if verdict.finding:
        words = f"BUG: {verdict.finding}"
    elif verdict.bound is None:
        words = f"rounding ({deviation})"
    else:
        words = (
            f"lossy, as --grad-compression {compression} is ({deviation}, "
            f"bound {verdict.bound:.1e})"
        )
    return f"{verdict.layout}: {words}"


def log_to_wandb(
    comparison: dict, picture: Path, out: Path, mode: str, project: str | None
) -> None:
    """Log the table and the picture as one run on wandb; a failure there costs only that run.

    ``mode`` is train_llm.py's ``--wandb``. The run is named after the comparison, and its group is
    that of the training runs.
    """
    online = mode == "online" or (mode == "auto" and wandb_key_configured())
    for attempt in ("online", "offline") if online else ("offline",):
        try:
            # wandb prompts only where stderr is a terminal, and prints before it reads "silent".
            with contextlib.redirect_stderr(io.StringIO()):
                where = _wandb_run(comparison, picture, out, attempt, project)
            print(f"wandb: {where}", flush=True)
            return
        except Exception as error:
            # Only the type: the message may have the server's answer, and the answer the key.
            print(f"wandb: {attempt} failed ({type(error).__name__})", flush=True)
            with contextlib.suppress(Exception):
                sys.modules["wandb"].teardown(exit_code=1)


def _wandb_run(comparison: dict, picture: Path, out: Path, mode: str, project: str | None) -> str:
    import wandb

    name, (headers, rows) = out.resolve().name, table_rows(comparison)
    quiet = {"console": "off", "silent": True, "init_timeout": 30, "finish_timeout": 60}
    private = {"disable_code": True, "disable_git": True, "save_code": False}
    place = {"name": name, "group": name, "job_type": "comparison", "dir": out}
    run = wandb.init(
        mode=mode,
        project=wandb_project(project),
        **place,
        config={key: comparison[key] for key in ("recipe", "reference", "dtype", "flags")},
        settings=wandb.Settings(**quiet, **private, reinit="create_new"),
    )
    table = wandb.Table(columns=[header.replace("\n", " ") for header in headers], data=rows)
    run.log({"comparison": table, "loss_curves": wandb.Image(str(picture))})
    upload = f"offline, upload with: wandb sync {Path(run.dir).parent}"
    where = upload if mode == "offline" else run.url
    run.finish()
    return where
