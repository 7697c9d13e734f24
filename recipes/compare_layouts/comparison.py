"""The content of comparison.json, from run directories alone, so that it can be made any time.

Losses are in nats per token; a deviation is |a-b|/|b| against the reference run b, per step.
"""

import statistics
from pathlib import Path

import numpy as np

from planner.collectives import collectives
from recipes.compare_layouts.differences import OF_A_TRAINING, differing_flags
from recipes.compare_layouts.judge import QUANTITIES, UNIT_ROUNDOFF, rounding_bound
from recipes.compare_layouts.results import Run
from training.config.options import planner_options


def _bytes_per_step(run: Run) -> int:
    """Bytes of all tensors that a rank communicates in an optimizer step, each counted whole.

    In a pipeline, those of the rank with most.
    """
    options = planner_options(run.config, cuda=run.start.get("device", "cpu") != "cpu")
    model, seq_len = run.config.model, run.config.step.seq_len
    totals = []
    for pp_rank in range(run.layout.pp):
        stages = run.layout.rank_stages(model, seq_len, pp_rank)
        sent = collectives(model, run.layout, options, seq_len, stages)
        totals.append(sum(c.count * c.units * c.bytes for c in sent))
    return max(totals)


def _describe(run: Run) -> dict:
    """One layout of comparison.json, without its deviations."""
    peaks = [row["peak_memory_bytes"] for row in run.rows if row["peak_memory_bytes"] is not None]
    curve = {name: [row[name] for row in run.rows] for name in ("step", "tokens", *QUANTITIES)}
    return {
        "label": run.label,
        "layout": run.layout.name,
        "run_dir": str(run.path),
        "dtype": run.config.step.dtype,
        "grad_compression": run.lossy.compression if run.lossy else "none",
        "global_batch_size": run.config.step.global_batch_size,
        "micro_batch_size": run.layout.micro_batch_size,
        "micro_batches": run.layout.micro_batches,
        "curve": curve,
        "final_loss": run.rows[-1]["loss"],
        "tokens_per_s": statistics.median(row["tokens_per_s"] for row in run.rows),
        "peak_memory_bytes": max(peaks, default=None),
        "bytes_per_step": _bytes_per_step(run),
        "flags": run.start.get("command", [])[1:],
        "versions": {"python": run.start.get("python"), **run.start.get("versions", {})},
        "git_commit": run.start.get("git_commit"),
        "device": run.start.get("device"),
    }


def _compare(run: Run, reference: Run, bounds: dict[str, dict[int, float]]) -> dict:
    """The deviations of a run, the largest, and the first step at which one is above its bound."""
    curves, largest, above = {}, {}, {}
    for quantity in QUANTITIES:
        expected = {row["step"]: row[quantity] for row in reference.rows}
        points = []
        for row in run.rows:
            step, a, b = row["step"], row[quantity], expected.get(row["step"])
            if a is not None and b is not None:
                # 1 if only b is zero.
                points.append((step, abs(a - b) / (abs(b) or abs(a) or 1.0)))
        steps, values = [step for step, _ in points], [value for _, value in points]
        curves[quantity] = {"step": steps, "value": values}
        # The first step with the largest deviation; None without a step in common.
        worst = max(points, key=lambda point: point[1], default=None)
        largest[quantity] = worst and {"value": worst[1], "step": worst[0]}
        over = (step for step, value in points if value > bounds[quantity][step])
        above[quantity] = next(over, None)
    return {"deviation": curves, "max_deviation": largest, "above_bound": above}


def build_comparison(runs: list[Run], reference: Run, flags: list[str]) -> dict:
    """comparison.json, with the rounding bound of the dtype with the fewest digits.

    Where gradients are compressed, the bound is at least that of the compression. Runs of other
    data, models or global batches are not the same training: they have no deviations.
    """
    differing = differing_flags(runs)
    compared = not OF_A_TRAINING & differing.keys()
    steps = sorted({row["step"] for run in runs for row in run.rows})
    dtype = max((run.config.step.dtype for run in runs), key=UNIT_ROUNDOFF.get)
    lossy = [run.lossy for run in runs if run.lossy]
    bounds = {}
    for quantity in QUANTITIES:
        rounding = rounding_bound(dtype, np.array(steps), quantity).tolist()
        bounds[quantity] = {
            step: max([bound, *(loss.bound(step, quantity) for loss in lossy)])
            for step, bound in zip(steps, rounding, strict=True)
        }
    nothing = {"deviation": None, "max_deviation": None, "above_bound": False}
    return {
        "recipe": " and ".join(dict.fromkeys(Path(run.config.recipe).stem for run in runs)),
        "reference": reference.label if compared else None,
        "global_batches_differ": "--global-batch-size" in differing,
        "differing_flags": differing,
        "dtype": dtype,
        "grad_compressions": sorted({loss.compression for loss in lossy}),
        "rounding_bound": {"step": steps} | {q: list(bounds[q].values()) for q in QUANTITIES},
        "flags": flags,
        "layouts": [
            _describe(run) | (_compare(run, reference, bounds) if compared else nothing)
            for run in runs
        ],
    }
