"""Published runs of other trainers, in the terms of this planner. Torch-free."""

import csv
from dataclasses import dataclass, replace
from pathlib import Path

from models.config import LlamaConfig
from models.weights import block_activations
from parallel.layout import Layout
from parallel.stages import Stage, make_stages
from planner.machine import Machine
from planner.memory import Options, block_bytes
from planner.time import block_seconds, elementwise_seconds

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
# Largest bytes per local logit of cross-entropy, measured with live tensors on a CPU: of float()
# logits, with those in 16 bits kept, as torchtitan did, or not; of DTensor's loss_parallel; and of
# a compiled loss.
FLOAT_LOGITS, KEPT_LOGITS, LOSS_PARALLEL, COMPILED_LOSS = 12.3, 14.3, 22.3, 6.3
# An RMSNorm of single operations reads and writes about 30 bytes an element more than a fused one.
UNFUSED_STREAM_BYTES = 28 + 2 * 30


@dataclass(frozen=True)
class Facts:
    """What another trainer does in another way.

    Attributes:
        checkpoint: activation checkpointing: none, full or selective.
        logit_bytes: largest bytes per local logit in the loss.
        stream_bytes: what norms and residual stream of a block read and write per element and
            forward, in 16 bits.
        bubble: part of a step in which pipeline ranks wait.
    """

    checkpoint: str
    logit_bytes: float
    stream_bytes: int
    bubble: float


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

    def block_bytes(self, checkpoint: str) -> int:
        """What a block keeps for its backward, with this checkpointing."""
        if self.source in ("torchtitan", "nanotron", "hagemann"):
            return _block_bytes(self, checkpoint)
        if checkpoint == "selective":
            return _selective_bytes(self.model, self.layout, self.options)
        options = replace(self.options, activation_checkpoint=checkpoint)
        return block_bytes(self.model, self.layout, options)

    def block_seconds(self, machine: Machine) -> float:
        """Computing of a block, forward and backward, and what is computed again."""
        layout, options, facts = self.layout, self.options, self.facts
        total, forward = block_seconds(self.model, layout, options, machine)
        tp = layout.tp
        shards = tp if options.sequence_parallel else 1
        added = (facts.stream_bytes - 28) * self.model.hidden_size / shards
        traffic = added + sum(
            kept.traffic * kept.local_width(tp) / (shards if kept.sharding == "stream" else 1)
            for kept in block_activations(self.model)
        )
        more = elementwise_seconds(added, layout, options, machine)
        elementwise = elementwise_seconds(traffic, layout, options, machine)
        again = {"none": 0.0, "selective": elementwise, "full": forward + more}
        return total + 3 * more + again[facts.checkpoint]


def _block_bytes(row: Row, checkpoint: str) -> int:
    """What a block of another trainer keeps: Korthikanti et al. 2022 for SwiGLU, grouped queries
    and flash attention."""
    model, layout, options = row.model, row.layout, row.options
    t, d = layout.tp, model.hidden_size
    tokens = layout.micro_batch_size * options.seq_len // layout.cp
    k, f = model.kv_heads * model.head_size, model.intermediate_size
    u = t if options.sequence_parallel else 1
    x, heads = 2 * d / u, 4 * model.num_attention_heads / t
    if checkpoint == "full":
        return round(tokens * x)
    if checkpoint == "selective":
        # torchtitan's: every second matrix product, attention, and what was scattered; or the sum
        # that compilation does not keep.
        scattered = 2 * x if t > 1 else 0 if options.compile else x
        matrices = 2 * (d + k) / t + 2 * d / t + 2 * f / t
        return round(tokens * (x + matrices + heads + scattered))
    # The gathered input of each region is kept, not gathered again as Megatron-LM does.
    total = 2 * x + 4 * d + 2 * (d + 2 * k) / t + 2 * d / t + heads + 8 * f / t + 8 / u
    if row.source == "hagemann":
        total += 2 * d / t  # the result of attention, by heads and by tokens
        total += 0 if "RMS" in row.cells["note"] else 2 * 6 * d / u
    return round(tokens * total)


def _selective_bytes(model: LlamaConfig, layout: Layout, options: Options) -> int:
    """Selective checkpointing of a block of ours: its input, and the results of matrix products,
    attention and collectives."""
    c, s, d, cp = options.dtype_bytes, options.wide_bytes, model.hidden_size, layout.cp
    tokens = layout.micro_batch_size * options.seq_len // cp
    stream = tokens // (layout.tp if options.sequence_parallel else 1)
    widths = {a.name: a.local_width(layout.tp) for a in block_activations(model)}
    q, k, f = widths["queries"], widths["keys"], widths["gate"]
    kept = c * stream * d + 2 * c * tokens * (q + k + f + d) + 24 * (1 if cp == 1 else 2)
    kept += s * widths["log-sum-exp of attention"] * tokens
    if layout.tp > 1:
        kept += c * d * (2 * tokens + (2 * stream if options.sequence_parallel else 0))
    return kept + (c * 2 * k * cp * tokens if cp > 1 else 0)


def _facts(cells: dict, tp: int, bubble: float, checkpoint: str) -> Facts:
    source = cells["source"].split("-")[0]
    logits = FLOAT_LOGITS
    if source == "torchtitan":
        logits = LOSS_PARALLEL if tp > 1 else KEPT_LOGITS
        logits = COMPILED_LOSS if "2025" in cells["source"] else logits
    elif source == "hagemann":
        logits = KEPT_LOGITS * tp  # whole ones, gathered by each rank
    unfused = source == "hagemann" and "RMS" not in cells["note"]
    return Facts(checkpoint, logits, UNFUSED_STREAM_BYTES if unfused else 28, bubble)


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
    options = Options(
        seq_len=seq_len,
        sequence_parallel=parallel,
        activation_checkpoint="full" if checkpoint == "full" else "none",
        compile=compiled,
    )
    bubble = (pp - 1) / (chunks * layout.micro_batches + pp - 1)
    facts = _facts(cells, tp, bubble, checkpoint)
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
