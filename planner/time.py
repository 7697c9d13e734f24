"""Seconds of an optimizer step, by formula. Torch-free.

A table's constants are good to about a quarter, calibrated ones to a few percent (docs/planning.md
has the errors against published runs).
"""

import collections
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from models.config import LlamaConfig
from models.weights import block_activations, block_weights
from parallel.layout import Layout
from parallel.options import checkpoint_every
from parallel.stages import Stage, bubble_fraction
from planner.collectives import collectives
from planner.machine import Machine
from planner.memory import Options, stage_parameters


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


def elementwise_seconds(
    traffic: float, layout: Layout, options: Options, machine: Machine
) -> float:
    """Of elementwise operations that move so many bytes of a token in 16 bits, once through a
    micro-batch; compilation leaves about half."""
    tokens = layout.micro_batch_size * options.seq_len // layout.cp
    moved = tokens * options.dtype_bytes / 2 * traffic
    return machine.memory_seconds(moved) * (0.5 if options.compile else 1)


def block_seconds(
    model: LlamaConfig, layout: Layout, options: Options, machine: Machine
) -> tuple[float, float]:
    """Computing of a block, forward and backward, of one micro-batch; and of its forward alone.

    A backward has twice the matrix products, 2.5 times the FLOPs of attention (flash attention
    computes its scores again; Dao 2023), and twice the rest. The table of activations has what
    elementwise operations read and write.
    """
    tp, tokens = layout.tp, layout.micro_batch_size * options.seq_len // layout.cp
    matmul = sum(
        machine.product_seconds(2 * tokens * weight.product_numel(tp))
        for weight in block_weights(model)
        if weight.in_matmul
    )
    width = model.num_attention_heads * model.head_size
    attention = machine.attention_seconds(2 * tokens * options.seq_len * width // tp)
    shards = tp if options.sequence_parallel else 1
    traffic = sum(
        kept.traffic * kept.local_width(tp) / (shards if kept.sharding == "stream" else 1)
        for kept in block_activations(model)
    )
    rest = elementwise_seconds(traffic, layout, options, machine)
    return 3 * matmul + 3.5 * attention + 3 * rest, matmul + attention + rest


def head_seconds(model: LlamaConfig, layout: Layout, options: Options, machine: Machine) -> float:
    """Computing of head and loss, forward and backward, of one micro-batch: three products, and
    about ten passes over logits in float32."""
    tokens = layout.micro_batch_size * options.seq_len // layout.cp
    logits = tokens * -(-model.vocabulary // layout.tp)
    product = machine.product_seconds(2 * logits * model.hidden_size / options.loss_chunks)
    return 3 * product * options.loss_chunks + machine.memory_seconds(40 * logits)


def step_time(
    model: LlamaConfig,
    layout: Layout,
    options: Options,
    machine: Machine,
    stages: Sequence[Stage] = (),
    block: float | None = None,
) -> Time:
    """Seconds of an optimizer step; ``planner/collectives.py`` counts what is sent.

    A rank's transfers for tp and cp wait; those of FSDP hide under the computing of the same
    micro-batch, and under the waiting for its host, up to a part of that, but for the first unit;
    a quarter of those between pipeline stages shows.

    Args:
        stages: of the whole pipeline.
        block: seconds of computing a block, forward and backward; None: by formula.
    """
    m, every = layout.micro_batches, checkpoint_every(options.activation_checkpoint)
    sent = _sent_seconds(model, layout, options, machine)
    if block is None:
        block, forward = block_seconds(model, layout, options, machine)
        block += forward / every if every else 0.0
    head = head_seconds(model, layout, options, machine)
    c = machine.constants
    queued = c.host * (1 / 9 if options.compile else 1) * (1 + (1 / (3 * every) if every else 0))
    tp, cp = sent["block", "tp"] / m, sent["block", "cp"] / m
    waits = max(0.0, queued - block - tp - cp)
    ends = sent["embedding", "tp"] / m, (sent["head", "tp"] + sent["loss", "tp"]) / m

    def seconds(part: tuple[int, bool, bool]) -> float:
        n, first, last = part
        return n * (block + tp + cp + waits) + first * ends[0] + last * (ends[1] + head)

    n, first, last = max(_parts(model, stages), key=seconds)
    compute, units = n * block + last * head, {"block": n, "embedding": first, "head": last}
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


def _parts(model: LlamaConfig, stages: Sequence[Stage]) -> set[tuple[int, bool, bool]]:
    """Of the ranks of each pipeline coordinate: number of blocks, and whether the ends."""
    parts: dict[int, tuple[int, bool, bool]] = {}
    for stage in stages:
        n, first, last = parts.get(stage.pp_rank, (0, False, False))
        here = n + len(stage.blocks), first or stage.first, last or stage.last
        parts[stage.pp_rank] = here
    return set(parts.values()) or {(model.num_hidden_layers, True, True)}


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
    seconds: collections.defaultdict = collections.defaultdict(float)
    if options.grad_compression != "none":
        # Compression is not planned: gradients count as if they were sent whole.
        options = replace(options, grad_compression="none")
    for row in collectives(model, layout, options, options.seq_len):
        ranks, stride = dims[row.dim]
        one = machine.collective_seconds(row.bytes, ranks, stride, row.kind, layout.world_size)
        dim = row.dim
        if dim not in ("tp", "cp"):
            dim = "each" if layout.zero >= 2 and dim != "dp_replicate" else "once"
        # Of blocks, a part of which sends something again, the mean.
        part = row.units / model.num_hidden_layers if row.unit == "block" else 1
        seconds[row.unit, dim] += part * row.count * one
    return seconds


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
    size = layout.micro_batch_size * options.seq_len // layout.cp * model.hidden_size
    size *= options.dtype_bytes / (layout.tp if options.sequence_parallel else 1)
    stride, pieces = layout.world_size // layout.pp, len(stages) // layout.pp
    one = machine.collective_seconds(size, 2, stride, "send", layout.world_size)
    return 0.25 * 2 * layout.micro_batches * pieces * one
