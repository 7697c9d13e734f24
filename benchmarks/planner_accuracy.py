"""The planner's formulas beside published runs: memory, what ran out of it, step times, rankings.

    python -m benchmarks.planner_accuracy --rows tests/planner_rows.csv

Rows are those of other trainers: what these do in another way is said here, from their sources and
papers (Hagemann's: github.com/Aleph-Alpha/scaling), and fitted to no row. --residuals prints every
row. Torch-free.
"""

import collections
import itertools
import math
import statistics
import sys
from dataclasses import replace
from pathlib import Path

from benchmarks.published_runs import GPUS, ROWS, SLOWER, Row, read_rows
from common.text import columns
from parallel.stages import Stage, bubble_fraction
from planner.machine import Constants, Machine, load_machine
from planner.memory import (
    MicroBatch,
    holding,
    in_flight,
    micro_batch_bytes,
    rank_memory,
    stage_parameters,
    unit_sizes,
    working_bytes,
)
from planner.search import CONTEXT_GIB, FRAGMENTATION, GIB
from planner.time import step_time
from recipes.plan.learn import fit
from training.config.command_line import Parser

TIMED = [
    ("dgxc", "H100-80"),
    ("hagemann", "A100-80"),
    ("llm", "A100-80"),
    ("llm", "A100-40"),
    ("fms", ""),
    ("torchtitan", "A100-80"),
    ("torchtitan", SLOWER),
]
# Every so many rows one is for calibration; the errors are those of the others.
CALIBRATED_EVERY = 4
# Bytes per parameter whole on each rank, and of those that ZeRO-1 shards: 16-bit weights,
# gradients, for nanotron in float32 and in 16 bits; master weights and moments.
WHOLE, SHARED = {"nanotron": 2 + 4 + 2, "hagemann": 2 + 2}, 12


def predicted_gib(row: Row) -> float:
    """Memory of the fullest ranks as the caching allocator reserves it."""
    ranks = collections.defaultdict(list)
    for stage in row.stages:
        ranks[stage.pp_rank].append(stage)
    found = []
    for stages in list(ranks.values()) or [()]:
        units = unit_sizes(row.model, row.layout)
        rank = holding(row.model, stages)
        held = rank_memory(row.layout, row.options, rank, units, _micro_batch(row))
        total = held.total
        if row.source in WHOLE:
            shared = row.layout.dp if row.cells["zero"] == "1" else 1
            whole = stage_parameters(row.model, replace(row.layout, dp=1), stages)
            total = whole * (WHOLE[row.source] + SHARED / shared) + held.activations
            total += max(held.loss, held.working)
        elif row.source == "torchtitan" and stages:
            total += _torch_buffers(row, stages) - held.buffers
        found.append(total)
    return max(found) * FRAGMENTATION / GIB


def _micro_batch(row: Row) -> MicroBatch:
    """What a micro-batch of the row's trainer holds, in place of what ours does."""
    model, layout, options = row.model, row.layout, row.options
    uncheckpointed = replace(options, activation_checkpoint="none")
    kept = row.block_bytes(row.facts.checkpoint)
    logits = layout.micro_batch_size * options.seq_len // layout.cp * model.vocab_size
    return micro_batch_bytes(model, layout, options)._replace(
        block=kept,
        loss_kept=4 * logits // layout.tp,
        loss=round(row.facts.logit_bytes * logits / layout.tp),
        working=working_bytes(model, layout, uncheckpointed)
        + max(0, row.block_bytes("none") - kept),
    )


def _torch_buffers(row: Row, stages: list[Stage]) -> int:
    """Where torch's own stages receive: a buffer per micro-batch and end, of which those in flight
    are the first inputs of the stages."""
    x, m = row.layout, row.layout.micro_batches
    flights = in_flight(x.pp_schedule, x.pp, stages[0].pp_rank, m)
    count = sum(
        (m - n) * (not stage.first) + m * (not stage.last)
        for n, stage in zip(flights, stages, strict=True)
    )
    return count * micro_batch_bytes(row.model, x, row.options).boundary


def machine(row: Row) -> Machine:
    """The GPU of a row, with its network."""
    nic = row.number("inter_gbps_per_gpu")
    changes = {"nic_gbs": nic / 8} if nic else {}
    if row.cells["gpu"] == SLOWER:
        changes["hbm_tbs"] = 2.4
    return load_machine(GPUS[row.cells["gpu"]], **changes)


def predicted_seconds(row: Row, constants: Constants | None = None) -> float:
    """Of a step."""
    found = machine(row)
    found = replace(found, constants=constants) if constants else found
    x, block = row.layout, row.block_seconds(found)
    time = step_time(row.model, x, row.options, found, row.stages, block)
    ours = bubble_fraction(x.pp_schedule, x.pp, x.micro_batches) if x.pp > 1 else 0.0
    if not ours:
        return time.total
    theirs = row.facts.bubble
    return time.total + time.bubble * (theirs / (1 - theirs) / (ours / (1 - ours)) - 1)


def calibrate(rows: list[Row]) -> tuple[Constants, list[Row]]:
    """Constants fitted to some of the rows, and the others."""
    some = rows[::CALIBRATED_EVERY]
    samples = [(lambda c, row=row: predicted_seconds(row, c), row.seconds) for row in some]
    return fit(samples, Constants()), [row for row in rows if row not in some]


def rank_correlation(a: list[float], b: list[float]) -> float:
    """Spearman's."""

    def ranks(values: list[float]) -> list[int]:
        order = sorted(values)
        return [order.index(value) for value in values]

    n = len(a)
    gaps = sum((x - y) ** 2 for x, y in zip(ranks(a), ranks(b), strict=True))
    return 1 - 6 * gaps / (n * (n * n - 1))


Errors = list[tuple[Row, float]]


def memory_errors(rows: list[Row], source: str) -> Errors:
    """Relative errors of the memory; nanotron's are those of pp 1 and tp to 8."""
    chosen = [row for row in rows if row.source == source and row.number("mem_gib")]
    if source == "nanotron":
        chosen = [row for row in chosen if row.layout.pp == 1 and row.layout.tp <= 8]
    return [(row, predicted_gib(row) / row.number("mem_gib") - 1) for row in chosen]


def memory_labels(rows: list[Row]) -> list[tuple[Row, float, bool]]:
    """Predicted part of the usable memory, and whether it ran out, of Hagemann's runs."""
    return [
        (row, (predicted_gib(row) + CONTEXT_GIB) / machine(row).usable_gib, status == "oom")
        for row in rows
        if row.source == "hagemann" and (status := row.cells["status"]) in ("ok", "oom")
    ]


def timed(rows: list[Row], source: str, gpu: str = "") -> list[Row]:
    """Runs whose step times are predicted: in 16 bits, on GPUs whose name begins with ``gpu``, but
    not on the slower ones unless they are asked for."""
    return [
        row
        for row in rows
        if row.source == source and row.seconds and row.cells["precision"] == "bf16"
        if row.cells["gpu"].startswith(gpu) and (gpu == SLOWER) == (row.cells["gpu"] == SLOWER)
    ]


def time_errors(rows: list[Row], constants: Constants | None) -> Errors:
    """Relative errors of the step times."""
    return [(row, predicted_seconds(row, constants) / row.seconds - 1) for row in rows]


def rankings(rows: list[Row], constants: Constants) -> tuple[list[float], list[float]]:
    """Rank correlation, and what the first pick loses to the best, of each sweep of five layouts or
    more."""
    groups, correlations, regrets = collections.defaultdict(list), [], []
    for row in rows:
        groups[row.cells["source_url"]].append(row)
    for group in groups.values():
        if len(group) < 5:
            continue
        predicted = [predicted_seconds(row, constants) for row in group]
        measured = [row.seconds for row in group]
        correlations.append(rank_correlation(predicted, measured))
        first = measured[predicted.index(min(predicted))]
        regrets.append(first / min(measured) - 1)
    return correlations, regrets


def nine_in_ten(errors: Errors) -> float:
    """What nine of ten relative errors stay within."""
    sizes = sorted(abs(error) for _, error in errors)
    return sizes[math.ceil(0.9 * len(sizes)) - 1]


def summary(errors: Errors) -> tuple[str, ...]:
    """Median with its sign; mean, median, nine in ten and largest of the sizes of the errors."""
    sizes = [abs(error) for _, error in errors]
    found = statistics.mean(sizes), statistics.median(sizes), nine_in_ten(errors), max(sizes)
    bias = statistics.median(error for _, error in errors)
    return f"{bias:+.1%}", *(f"{size:.1%}" for size in found)


def _labels_table(labels: list[tuple[Row, float, bool]]) -> list[str]:
    rows = [("predicted / usable", "runs", "ran out")]
    edges = (0, 0.5, 0.8, 0.9, 1.0, 1.1, 1.2, math.inf)
    for low, high in itertools.pairwise(edges):
        inside = [out for _, part, out in labels if low <= part < high]
        if inside:
            rows.append((f"{low} to {high}", len(inside), f"{statistics.mean(inside):.0%}"))
    return columns(rows)


def main() -> int:
    """Print the table."""
    parser = Parser(prog="python -m benchmarks.planner_accuracy", description=__doc__)
    parser.add_argument(
        "--rows",
        type=Path,
        default=ROWS,
        metavar="FILE.csv",
        help="published runs (default: the excerpt of the tests)",
    )
    parser.add_argument("--residuals", action="store_true", help="also print the error of each row")
    options = parser.parse_args()
    rows = read_rows(options.rows)
    table, listed = [("what", "rows", "bias", "mean", "median", "9 of 10", "largest")], []
    for source in ("torchtitan", "nanotron"):
        errors = memory_errors(rows, source)
        table.append((f"memory, {source}", len(errors), *summary(errors)))
        listed += [("memory", row, error) for row, error in errors]
    for source, gpu in TIMED:
        if errors := time_errors(timed(rows, source, gpu), None):
            table.append((f"step, {source} {gpu}, table", len(errors), *summary(errors)))
    lines = []
    for source in ("dgxc", "hagemann"):
        chosen = timed(rows, source)
        constants, others = calibrate(chosen)
        errors = time_errors(others, constants)
        table.append((f"step, {source}, calibrated", len(others), *summary(errors)))
        listed += [("step", row, error) for row, error in errors]
        lines.append(f"{source}: {len(chosen) - len(others)} rows fitted, {constants}")
    correlations, regrets = rankings(chosen, constants)
    print("\n".join(columns(table)) + "\n")
    print(
        f"hagemann, {len(correlations)} sweeps: rank correlation median "
        f"{statistics.median(correlations):.2f}, mean {statistics.mean(correlations):.2f}; the "
        f"first pick loses {statistics.median(regrets):.1%} in the median, {max(regrets):.1%} at "
        "most"
    )
    labels = memory_labels(rows)
    right = statistics.mean((part > 1) == out for _, part, out in labels)
    print(f"hagemann, {len(labels)} runs: {right:.1%} rightly said to run out of memory or not\n")
    print("\n".join([*_labels_table(labels), "", *lines]))
    if options.residuals:
        found = [
            (kind, row.cells["row_id"], row.name, f"{error:+.1%}") for kind, row, error in listed
        ]
        print("\n" + "\n".join(columns([("what", "row", "run", "error"), *found])))
    return 0


if __name__ == "__main__":
    sys.exit(main())
