"""The planner's formulas beside published runs: memory, what ran out of it, step times, rankings.

    python -m benchmarks.planner_accuracy --rows tests/planner_rows.csv

Rows are those of other trainers: what these do in another way is said here, from their sources and
papers (Hagemann's: github.com/Aleph-Alpha/scaling), and fitted to no row. --residuals prints every
row. Torch-free.
"""

import collections
import csv
import itertools
import math
import statistics
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from common.text import columns
from models.config import LlamaConfig
from parallel.layout import Layout
from parallel.stages import Stage, make_stages
from planner.machine import Constants, Machine, load_machine
from planner.memory import (
    Facts,
    MicroBatch,
    Options,
    block_bytes,
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

ROWS = Path(__file__).parent.parent / "tests" / "planner_rows.csv"
GPUS = {
    "A100-40": "a100-40",
    "A100-80": "a100-80",
    "H100-80": "h100",
    "H200-SXM": "h200",
    "H100-96-HBM2e-500W": "h100",
}
# Of torchtitan's runs on H100: memory of 2.4 TB/s, and a limit of 500 W in place of 700.
SLOWER = "H100-96-HBM2e-500W"
SOURCES = "torchtitan", "nanotron", "hagemann", "dgxc", "llm", "fms"
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
# Largest bytes per local logit of cross-entropy, measured with live tensors on a CPU: of float()
# logits, with those in 16 bits kept, as torchtitan did, or not; of DTensor's loss_parallel; and of
# a compiled loss.
FLOAT_LOGITS, KEPT_LOGITS, LOSS_PARALLEL, COMPILED_LOSS = 12.3, 14.3, 22.3, 6.3
# An RMSNorm of single operations reads and writes about 30 bytes an element more than a fused one.
UNFUSED_STREAM_BYTES = 28 + 2 * 30
# Bytes per parameter whole on each rank, and of those that ZeRO-1 shares out: 16-bit weights,
# gradients, for nanotron in float32 and in 16 bits; master weights and moments.
WHOLE, SHARED = {"nanotron": 2 + 4 + 2, "hagemann": 2 + 2}, 12


@dataclass(frozen=True)
class Row:
    """A published run: its cells, and what it is in our terms."""

    cells: dict
    model: LlamaConfig
    layout: Layout
    options: Options
    stages: list[Stage]
    facts: Facts

    @property
    def source(self) -> str:
        """Who published it."""
        return self.cells["source"].split("-")[0]

    @property
    def name(self) -> str:
        """For a line of its own."""
        return f"{self.cells['source']} {self.cells['model']} {self.layout.name}"

    def number(self, column: str) -> float | None:
        """A measured value, if it was published."""
        return float(self.cells[column]) if self.cells[column] else None

    @property
    def seconds(self) -> float | None:
        """Of a step, if its speed was published."""
        if self.cells["step_s"] or not (self.cells["tokens_s_gpu"] and self.cells["gbs"]):
            return self.number("step_s")
        tokens = self.number("gbs") * self.options.seq_len
        return tokens / self.number("tokens_s_gpu") / self.number("n_gpus")


def _block_bytes(cells: dict):
    """What a block of another trainer keeps: Korthikanti et al. 2022 for SwiGLU, grouped queries
    and flash attention."""
    source = cells["source"].split("-")[0]

    def kept(model: LlamaConfig, layout: Layout, options: Options) -> int:
        t, d = layout.tp, model.hidden_size
        tokens = layout.batch_size * options.seq_len // layout.cp
        k, f, heads = model.kv_heads * model.head_size, model.intermediate_size, 4
        u = t if options.sequence_parallel else 1
        x, heads = 2 * d / u, 4 * model.num_attention_heads / t
        if options.activation_checkpoint == "full":
            return round(tokens * x)
        if options.activation_checkpoint == "selective":
            # torchtitan's: every second matrix product, attention, and what was scattered; or the
            # sum that compilation does not keep.
            scattered = 2 * x if t > 1 else 0 if options.compile else x
            matrices = 2 * (d + k) / t + 2 * d / t + 2 * f / t
            return round(tokens * (x + matrices + heads + scattered))
        # The gathered input of each region is kept, not gathered again as Megatron-LM does.
        total = 2 * x + 4 * d + 2 * (d + 2 * k) / t + 2 * d / t + heads + 8 * f / t + 8 / u
        if source == "hagemann":
            total += 2 * d / t  # the result of attention, by heads and by tokens
            total += 0 if "RMS" in cells["note"] else 2 * 6 * d / u
        return round(tokens * total)

    return kept if source in ("torchtitan", "nanotron", "hagemann") else block_bytes


def _facts(cells: dict, tp: int, bubble: float) -> Facts:
    source = cells["source"].split("-")[0]
    logits = FLOAT_LOGITS
    if source == "torchtitan":
        logits = LOSS_PARALLEL if tp > 1 else KEPT_LOGITS
        logits = COMPILED_LOSS if "2025" in cells["source"] else logits
    elif source == "hagemann":
        logits = KEPT_LOGITS * tp  # whole ones, gathered by each rank
    unfused = source == "hagemann" and "RMS" not in cells["note"]
    return Facts(
        logit_bytes=logits,
        block_bytes=_block_bytes(cells),
        stream_bytes=UNFUSED_STREAM_BYTES if unfused else 28,
        bubble=bubble,
    )


def read_row(cells: dict) -> Row:
    """A row of the file in our terms.

    A feed-forward without gate counts as a SwiGLU with as many weights. Stages are balanced as ours
    are, those of dgxc even, and Hagemann's even with embedding, norm and head counted as blocks. A
    pipeline whose micro-batch is not stated has as many as stages, torchtitan's default then.
    """

    def whole(name: str, default: int = 1) -> int:
        return int(float(cells[name])) if cells[name] else default

    ffn = whole("ffn") if cells["arch"] == "swiglu" else whole("ffn") * 2 // 3
    model = LlamaConfig(
        hidden_size=whole("hidden"),
        intermediate_size=ffn,
        num_hidden_layers=whole("layers"),
        num_attention_heads=whole("heads"),
        num_key_value_heads=whole("kv_heads"),
        vocab_size=whole("vocab"),
        tie_word_embeddings=cells["tied"] == "1",
    )
    dp, tp, pp, chunks = (whole(name) for name in ("dp", "tp", "pp", "vpp"))
    share = whole("gbs") // dp
    size = whole("mbs", max(1, share // pp))
    source, seq_len = cells["source"].split("-")[0], whole("seq")
    zero = 1 if pp > 1 else whole("zero", 3)
    layout = Layout(
        dp,
        tp,
        size,
        share // size,
        cp=whole("cp"),
        zero=zero,
        pp=pp,
        pp_schedule="interleaved" if chunks == 2 else "1f1b",
    )
    checkpoint = cells["ac"].rstrip("?").replace("_op", "") or "none"
    compiled = cells["compile"] != "0" if source == "dgxc" else cells["compile"] == "1"
    parallel = tp > 1 and (cells["sp"] == "1" or source == "torchtitan")
    options = Options(seq_len, parallel, checkpoint, compile=compiled)
    bubble = (pp - 1) / (chunks * layout.micro_batches + pp - 1)
    facts = _facts(cells, tp, bubble)
    stages = _stages(source, model, layout, chunks, seq_len) if pp > 1 else []
    return Row(cells, model, layout, options, stages, facts)


def _stages(source: str, model: LlamaConfig, layout: Layout, chunks: int, seq_len: int) -> list:
    if source not in ("dgxc", "hagemann"):
        return make_stages(model, layout.pp_schedule, layout.pp, seq_len)
    n, layers = layout.pp * chunks, model.num_hidden_layers
    ends = [i * layers // n for i in range(n + 1)]
    if source == "hagemann":
        size, longer = divmod(layers + 3, n)
        ends = [min(layers, max(0, i * size + min(i, longer) - 1)) for i in range(n + 1)]
    return [Stage(i, n, i % layout.pp, range(*ends[i : i + 2])) for i in range(n)]


def read_rows(file: Path) -> list[Row]:
    """The usable rows of a file: of known trainers and GPUs, and not suspect. Left out is
    checkpointing of every second block, which is not ours."""
    with file.open(newline="") as f:
        rows = [
            cells
            for cells in csv.DictReader(f)
            if cells["core"] == "1" and cells["source"].split("-")[0] in SOURCES
            if cells["gpu"] in GPUS and cells["gbs"] and cells["ac"] != "selective_layer2"
        ]
    return [read_row(cells) for cells in rows]


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
    model, layout, options, kept = row.model, row.layout, row.options, row.facts.block_bytes
    uncheckpointed = replace(options, activation_checkpoint="none")
    computed_again = kept(model, layout, uncheckpointed) - kept(model, layout, options)
    logits = layout.batch_size * options.seq_len // layout.cp * model.vocab_size
    return micro_batch_bytes(model, layout, options)._replace(
        block=kept(model, layout, options),
        loss_kept=4 * logits // layout.tp,
        loss=round(row.facts.logit_bytes * logits / layout.tp),
        working=working_bytes(model, layout, uncheckpointed) + max(0, computed_again),
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
    return step_time(row.model, row.layout, row.options, found, row.stages, row.facts).total


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
