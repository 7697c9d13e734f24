"""Published runs of other trainers, in the terms of this planner. Torch-free."""

import csv
from dataclasses import dataclass
from pathlib import Path

from models.config import LlamaConfig
from parallel.layout import Layout
from parallel.stages import Stage, make_stages
from planner.memory import (
    Facts,
    Options,
    block_bytes,
)

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
