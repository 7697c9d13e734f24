"""Train or collect the runs of a comparison, and report about them."""

import argparse
import dataclasses
import json
import math
import sys
from pathlib import Path

from common.errors import ConfigError
from common.files import write_atomic
from common.text import printable
from recipes.compare_layouts.comparison import build_comparison
from recipes.compare_layouts.differences import differing_flags, named, statement
from recipes.compare_layouts.judge import Verdict, judge
from recipes.compare_layouts.plan import make_folder, parse_command, plan_runs, record_flags
from recipes.compare_layouts.plots import draw
from recipes.compare_layouts.report import log_to_wandb, print_table, verdict_line
from recipes.compare_layouts.results import read_run, read_runs
from recipes.compare_layouts.runs import PlannedRun, RunFailedError, train_runs


def compare(options: argparse.Namespace, train_flags: list[str]) -> int:
    """Train every layout and report; the exit code."""
    base, curves, float64 = plan_runs(options, train_flags)
    record_flags(options, train_flags, base, curves)
    train_runs(curves, options.out)
    runs = [read_run(run.run_dir) for run in curves]
    comparison = build_comparison(runs, runs[0], train_flags)
    return report(comparison, options, base.run.wandb_project, float64)


def collect(options: argparse.Namespace) -> int:
    """Report about runs that have been trained already, here or on a cluster; the exit code."""
    runs = read_runs(options.collect, options.out)
    options.out = options.out or Path("runs/compare-collected")
    make_folder(options.out)
    alone = [run for run in runs if run.layout.world_size == 1 and not options.no_reference]
    comparison = build_comparison(runs, (alone or runs)[0], [])
    if options.verdict and comparison["reference"] is None:
        raise ConfigError(f"--verdict compares runs of one training: {statement(comparison)}")
    for run in runs if options.verdict else ():
        read_run(options.out / "float64" / run.label)  # refuses what has not finished
    return report(comparison, options, runs[0].config.run.wandb_project, [])


def report(
    comparison: dict, options: argparse.Namespace, project: str | None, float64: list[PlannedRun]
) -> int:
    """Write and print everything; the exit code.

    Args:
        project: on wandb.
        float64: the runs that the verdict must train.
    """
    out, picture = options.out, options.out / "loss_curves.png"
    for name, values in comparison["differing_flags"].items():
        if not (options.batch_sizes and name == "--global-batch-size"):
            print(f"note: the runs differ in {name}: {printable(', '.join(map(str, values)))}")
    write_comparison(comparison, out)
    draw(comparison, picture)
    print_table(comparison)
    has_bug = False
    if options.verdict:
        train_runs(float64, out)
        has_bug = any(v.finding for v in judge_runs(comparison, out / "float64"))
        write_comparison(comparison, out)
        if has_bug:
            draw(comparison, picture)
    print(f"written: {out / 'comparison.json'}, {picture}")
    if has_bug:
        print("after a fix, compare again with another --out: finished runs are not run again")
    if options.wandb != "disabled":
        log_to_wandb(comparison, picture, out, options.wandb, project)
    return int(has_bug)


def write_comparison(comparison: dict, out: Path) -> None:
    """Write comparison.json."""
    text = json.dumps(comparison, indent=1, allow_nan=False)
    write_atomic(out / "comparison.json", text + "\n")


def judge_runs(comparison: dict, folder: Path) -> list[Verdict]:
    """Judge the float64 runs in ``folder``; print the verdicts and add them to ``comparison``.

    Raises:
        RunFailedError: if the runs cannot be judged. ConfigError: if one cannot be read.
    """
    names = [entry["label"] for entry in comparison["layouts"]]
    base = comparison["reference"]
    try:
        runs = {name: read_run(folder / name) for name in names}
        if differing := differing_flags(list(runs.values())):
            raise ValueError(f"they differ in {named(list(differing))}, and are not one training")
        lossy = {name: run.lossy for name, run in runs.items()}
        if lossy[base]:
            raise ValueError(f"the gradients of the reference {base} are compressed themselves")
        others = {name: folder / name for name in names if name != base}
        verdicts = judge(folder / base, others, lossy)
    except (OSError, ValueError) as error:
        raise RunFailedError(f"the runs in {folder} cannot be judged: {error}") from None
    for verdict in verdicts:
        print(verdict_line(verdict, runs[verdict.layout].config.memory.grad_compression))
    # JSON has no infinity; there is a finding then.
    comparison["verdict"] = [
        dataclasses.asdict(v) | ({} if math.isfinite(v.deviation) else {"deviation": None})
        for v in verdicts
    ]
    return verdicts


def main(argv: list[str] | None = None) -> int:
    """The command; its exit code."""
    try:
        options, train_flags = parse_command(sys.argv[1:] if argv is None else argv)
        return collect(options) if options.collect is not None else compare(options, train_flags)
    except (ConfigError, RunFailedError) as error:
        print(f"compare_layouts: error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        print("interrupted: start the same command again to go on", file=sys.stderr)
        return 130
