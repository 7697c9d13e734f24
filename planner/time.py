"""Seconds of an optimizer step, by formula. Torch-free.

A table's constants are good to about a quarter, calibrated ones to a few percent (docs/planning.md
has the errors against published runs).
"""

import collections
from collections.abc import Sequence
from dataclasses import dataclass, fields

from models.config import LlamaConfig
from parallel.layout import Layout
from parallel.stages import Stage, bubble_fraction
from planner.collectives import collectives
from planner.machine import Machine
from planner.memory import OURS, Facts, Options, stage_parameters

DTYPES = {2: "bfloat16", 4: "float32", 8: "float64"}


@dataclass(frozen=True)
class Time:
    """Seconds of a step on the slowest ranks, by what takes them.

    ``tp``, ``fsdp``, ``cp`` and ``pp`` are what is not hidden under computing; ``host`` is where
    the device waits to be told; ``bubble`` is where a pipeline rank waits for others.
    """

    compute: float
    tp: float
    fsdp: float
    cp: float
    pp: float
    bubble: float
    optimizer: float
    host: float

    @property
    def total(self) -> float:
        """All of them."""
        return sum(getattr(self, field.name) for field in fields(self))


def block_seconds(
    model: LlamaConfig,
    layout: Layout,
    options: Options,
    machine: Machine,
    facts: Facts = OURS,
) -> float:
    """Computing of a block, forward and backward, of one micro-batch.

    A backward has twice the matrix products, 2.5 times the FLOPs of attention (flash attention
    computes its scores again; Dao 2023), and twice the rest. Elementwise operations read and write
    28D for the norms and the stream, 16f for SwiGLU and 12 (q + 2k) bytes a token in a forward in
    16 bits; compilation leaves about half. Full checkpointing repeats the forward, selective what
    is elementwise.
    """
    tp, d, c = layout.tp, model.hidden_size, options.dtype_bytes
    tokens = layout.batch_size * options.seq_len // layout.cp
    heads, kv = model.num_attention_heads * model.head_size, model.kv_heads * model.head_size
    kv_rows = max(kv // tp, model.head_size)
    f = model.intermediate_size // tp
    products = [(d, heads // tp)] * 2 + [(d, kv_rows)] * 2 + [(d, f)] * 3
    matmul = sum(machine.product_seconds(2 * tokens * a * b) for a, b in products)
    attention = machine.attention_seconds(2 * tokens * options.seq_len * heads // tp)
    stream = facts.stream_bytes * d / (tp if options.sequence_parallel else 1)
    moved = tokens * c / 2 * (stream + 16 * f + 12 * (heads // tp + 2 * kv_rows))
    rest = machine.memory_seconds(moved) * (0.5 if options.compile else 1)
    again = {"none": 0.0, "selective": rest, "full": matmul + attention + rest}
    return 3 * matmul + 3.5 * attention + 3 * rest + again[options.activation_checkpoint]


def head_seconds(model: LlamaConfig, layout: Layout, options: Options, machine: Machine) -> float:
    """Computing of head and loss, forward and backward, of one micro-batch: three products, and
    about ten passes over logits in float32."""
    tokens = layout.batch_size * options.seq_len // layout.cp
    logits = tokens * -(-model.vocab_size // layout.tp)
    product = machine.product_seconds(2 * logits * model.hidden_size / options.loss_chunks)
    return 3 * product * options.loss_chunks + machine.memory_seconds(40 * logits)


def step_time(
    model: LlamaConfig,
    layout: Layout,
    options: Options,
    machine: Machine,
    stages: Sequence[Stage] = (),
    facts: Facts = OURS,
) -> Time:
    """Of one optimizer step; ``planner/collectives.py`` counts what is sent.

    A rank's transfers for tp and cp wait; those of FSDP hide under the computing of the same
    micro-batch, and under the waiting for its host, up to a part of that, but for the first unit;
    a quarter of those between pipeline stages shows.

    Args:
        stages: of the whole pipeline.
        facts: of another trainer.
    """
    m = layout.micro_batches
    sent = _sent_seconds(model, layout, options, machine)
    block = block_seconds(model, layout, options, machine, facts)
    head = head_seconds(model, layout, options, machine)
    c, full = machine.constants, options.activation_checkpoint == "full"
    queued = c.host * (1 / 9 if options.compile else 1) * (4 / 3 if full else 1)
    tp, cp = sent["block", "tp"] / m, sent["block", "cp"] / m
    waits = max(0.0, queued - block - tp - cp)
    ends = sent["embedding", "tp"] / m, (sent["head", "tp"] + sent["loss", "tp"]) / m

    def seconds(held: tuple[int, bool, bool]) -> float:
        n, first, last = held
        return n * (block + tp + cp + waits) + first * ends[0] + last * (ends[1] + head)

    n, first, last = max(_held(model, layout, stages), key=seconds)
    compute, units = n * block + last * head, {"block": n, "embedding": first, "head": last}
    bubble = facts.bubble
    if bubble is None:
        bubble = bubble_fraction(layout.pp_schedule, layout.pp, m) if layout.pp > 1 else 0.0
    shard = stage_parameters(model, layout) * n / model.num_hidden_layers / layout.shards
    return Time(
        compute=m * compute,
        tp=m * (n * tp + first * ends[0] + last * ends[1]) + sent["all", "tp"],
        fsdp=_fsdp_seconds(sent, units, c.overlap * (compute + n * waits), m),
        cp=m * n * cp,
        pp=_between_seconds(model, layout, options, machine, stages),
        bubble=m * seconds((n, first, last)) * bubble / (1 - bubble),
        optimizer=machine.memory_seconds(30 * shard) + c.fixed,
        host=m * n * waits,
    )


def _held(model: LlamaConfig, layout: Layout, stages: Sequence[Stage]) -> set[tuple]:
    """Of the ranks of each pipeline coordinate: number of blocks, and whether the ends."""
    found = {}
    for stage in stages:
        n, first, last = found.get(stage.pp_rank, (0, False, False))
        held = n + len(stage.blocks), first or stage.first, last or stage.last
        found[stage.pp_rank] = held
    return set(found.values()) or {(model.num_hidden_layers, True, True)}


def _sent_seconds(model, layout, options, machine) -> collections.defaultdict:
    """Seconds of a step, by unit and mesh dim; those of FSDP also by how often: a unit of what a
    micro-batch sends, as "each", or a step, as "once"."""
    dims = {
        "tp": (layout.tp, 1),
        "cp": (layout.cp, layout.tp),
        "dp": (layout.shards, layout.tp),
        "dp x cp": (layout.shards, layout.tp),
        "dp_replicate": (layout.replicas, layout.tp * layout.shards),
    }
    found = collections.defaultdict(float)
    for row in collectives(
        model,
        layout,
        seq_len=options.seq_len,
        sequence_parallel=options.sequence_parallel,
        dtype=DTYPES[options.dtype_bytes],
        activation_checkpoint=options.activation_checkpoint,
        compile=options.compile,
        loss_chunks=options.loss_chunks,
    ):
        ranks, stride = dims[row.dim]
        seconds = row.count * machine.collective_seconds(
            row.bytes, ranks, stride, row.kind, layout.world_size
        )
        dim = row.dim
        if dim not in ("tp", "cp"):
            dim = "each" if layout.zero >= 2 and dim != "dp_replicate" else "once"
        found[row.unit, dim] += seconds
    return found


def _fsdp_seconds(sent, units: dict[str, int], hidden: float, m: int) -> float:
    """What shows of FSDP's transfers: one unit's, or what a micro-batch does not hide."""
    total = 0.0
    for often, times in (("each", m), ("once", 1)):
        seconds = sum(n * sent[unit, often] for unit, n in units.items()) / times
        one = seconds / max(1, sum(units.values()))
        total += times * max(one, seconds - hidden)
    return total


def _between_seconds(model, layout, options, machine, stages) -> float:
    """What shows of the transfers between pipeline stages: a quarter."""
    if layout.pp == 1:
        return 0.0
    size = layout.batch_size * options.seq_len // layout.cp * model.hidden_size
    size *= options.dtype_bytes / (layout.tp if options.sequence_parallel else 1)
    stride, pieces = layout.world_size // layout.pp, len(stages) // layout.pp
    one = machine.collective_seconds(size, 2, stride, "send", layout.world_size)
    return 0.25 * 2 * layout.micro_batches * pieces * one
