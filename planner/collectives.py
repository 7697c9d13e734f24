"""What a layout holds and sends: placements and bytes of every parameter, collectives per step.

Torch-free, but for what looks at a model.
"""

import collections
import itertools
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from common.text import columns
from models.config import LlamaConfig
from parallel.layout import POWERSGD_RANK, Layout, powersgd_compresses
from parallel.stages import Stage, bubble_fraction

if TYPE_CHECKING:
    from torch.distributed.tensor.placement_types import Placement

    from models.decoder import Llama

DTYPE_BYTES = {"bfloat16": 2, "float32": 4, "float64": 8}


@dataclass(frozen=True)
class ParameterRow:
    """One parameter on this rank; ``bytes`` are those of the local shard in its stored dtype."""

    name: str
    shape: tuple[int, ...]
    placements: str
    local_shape: tuple[int, ...]
    bytes: int


@dataclass(frozen=True)
class Collective:
    """One kind of collective of one unit.

    Attributes:
        unit: the block, or another part of the model, that it belongs to; a block stands for all
            that the rank has.
        dim: mesh dim it runs over.
        kind: all_gather, reduce_scatter, all_reduce, or send and recv.
        why: what is sent.
        count: per optimizer step and unit, on every rank that has the unit.
        bytes: size of the whole tensor (the gathered one; the one before the scatter).
        units: how many such units the rank has: its blocks, or 1.
    """

    unit: str
    dim: str
    kind: str
    why: str
    count: int
    bytes: int
    units: int


def _short(placement: "Placement") -> str:
    # FSDP2's _StridedShard cuts the dim that tp has cut first; for a reader it is a shard too.
    return "R" if placement.is_replicate() else f"S({placement.dim})"


def parameter_rows(model: "Llama") -> list[ParameterRow]:
    """Every parameter of a model that is laid out, in order, as this rank holds it."""
    from torch.distributed.tensor import DTensor

    rows = []
    for name, p in model.named_parameters():
        local = p.to_local() if isinstance(p, DTensor) else p
        placements = map(_short, p.placements) if isinstance(p, DTensor) else ["whole"]
        rows.append(
            ParameterRow(
                name,
                tuple(p.shape),
                " ".join(placements),
                tuple(local.shape),
                local.numel() * local.element_size(),
            )
        )
    return rows


def collectives(
    model: LlamaConfig,
    layout: Layout,
    *,
    stages: Sequence[Stage] = (),
    seq_len: int,
    sequence_parallel: bool,
    dtype: str,
    activation_checkpoint: str = "none",
    compile: bool = False,
    loss_chunks: int = 1,
    grad_compression: str = "none",
) -> list[Collective]:
    """The collectives of one optimizer step, as :func:`parallel.parallelize` arranges them.

    With ``stages``, those of a rank that holds these stages of a pipeline. ``dtype`` is the compute
    dtype by name, as in the config.

    With ``grad_compression`` a row stands for all buckets of gradients together; PowerSGD's first
    steps send them whole. Left out: one all-reduce of two numbers over all ranks (loss and
    gradient norm), and one of a small CPU vector (target tokens, stop requested).
    """
    m, size = layout.micro_batches, DTYPE_BYTES[dtype]
    # Reductions of gradients a step: ZeRO-1 and 0 first sum over the micro-batches.
    times = m if layout.zero >= 2 else 1
    local_len = seq_len // layout.cp
    tokens = layout.batch_size * local_len
    stream = tokens * model.hidden_size * size  # [B, S / cp, D]
    reduced = max(size, 4)  # gradients, and the numbers of the loss
    found = []

    blocks = sum(len(stage.blocks) for stage in stages) or model.num_hidden_layers

    def add(unit: str, dim: str, kind: str, why: str, count: int, size: int, times=m) -> None:
        units = blocks if unit == "block" else 1
        found.append(Collective(unit, dim, kind, why, count * times, size, units))

    if layout.tp > 1:
        _tensor_parallel(stream, sequence_parallel, add)
        has_norm = not stages or any(stage.last for stage in stages)
        if part := _partial(model, layout, sequence_parallel, blocks, has_norm):
            why = "gradients of replicated weights"
            add("all", "tp", "all_reduce", why, 1, part * reduced, 1)
        if activation_checkpoint == "full":
            _recomputed(stream, sequence_parallel, compile, add)
        for length, chunks in collections.Counter(_chunks(local_len, loss_chunks)).items():
            part = layout.batch_size * length * reduced
            add("loss", "tp", "all_reduce", "largest logit of each token", chunks, part)
            add("loss", "tp", "all_reduce", "sum of exp, target logit", chunks, 2 * part)
    if layout.cp > 1:
        heads = model.kv_heads // layout.tp if model.kv_heads % layout.tp == 0 else 1
        both = 2 * layout.cp * tokens * heads * model.head_size * size
        gathers = 2 if activation_checkpoint == "full" else 1
        add("block", "cp", "all_gather", "keys and values", gathers, both)
        add("block", "cp", "reduce_scatter", "gradients of keys and values", 1, both)
    if grad_compression != "none" and layout.world_size > 1:
        each = reduced if grad_compression == "powersgd" else 2
        for why, numel in _compressed(model, grad_compression):
            add("all", "dp", "all_reduce", f"gradients: {why}", 1, numel * each, 1)
        return found
    dp, replicas = layout.shards, layout.replicas
    name = "dp x cp" if layout.cp > 1 else "dp"
    for unit, numel, gathers in _fsdp_units(model, layout):
        if dp > 1:
            add(unit, name, "all_gather", "parameters", gathers, numel * size, times)
            add(unit, name, "reduce_scatter", "gradients", 1, numel * reduced, times)
        if replicas > 1:
            part = numel // dp * reduced
            add(unit, "dp_replicate", "all_reduce", "gradients of a shard", 1, part, 1)
    if not stages:
        return found
    shards = layout.tp if sequence_parallel else 1
    _pipeline(stages, lambda kind, why: add("stage", "pp", kind, why, 1, stream // shards))
    elsewhere = set()
    if not any(stage.first for stage in stages):
        elsewhere |= {"embedding"}
    if not any(stage.last for stage in stages):
        elsewhere |= {"head", "loss"}
    return [row for row in found if row.unit not in elsewhere]


def _pipeline(stages: Sequence[Stage], add: Callable[[str, str], None]) -> None:
    """What crosses the ends of the stages of a rank, once a micro-batch."""
    here = {stage.index for stage in stages}
    for stage in stages:
        # Neighbours on one rank, as in the middle of a V, hand over in memory.
        if not stage.first and stage.index - 1 not in here:
            add("recv", f"hidden states from stage {stage.index - 1}")
            add("send", f"their gradients to stage {stage.index - 1}")
        if not stage.last and stage.index + 1 not in here:
            add("send", f"hidden states to stage {stage.index + 1}")
            add("recv", f"their gradients from stage {stage.index + 1}")


def _tensor_parallel(stream, sequence_parallel, add) -> None:
    # (unit, inputs that enter a region, outputs that leave one)
    for unit, enters, leaves in (("block", 2, 2), ("embedding", 0, 1), ("head", 1, 0)):
        if sequence_parallel:
            both = enters + leaves
            add(unit, "tp", "all_gather", "activations, forward and backward", both, stream)
            add(unit, "tp", "reduce_scatter", "activations, forward and backward", both, stream)
        else:
            if leaves:
                add(unit, "tp", "all_reduce", "activations, forward", leaves, stream)
            if enters:
                add(unit, "tp", "all_reduce", "activations, backward", enters, stream)


def _partial(model, layout, sequence_parallel, blocks, has_norm) -> int:
    """Elements of the dp shards whose gradients are parts of sums over tp, on the first rank."""
    d, dp = model.hidden_size, layout.shards
    norms = 2 * blocks + has_norm if sequence_parallel else 0
    projections = 2 * blocks if model.kv_heads % layout.tp else 0
    return norms * -(-d // dp) + projections * -(-model.kv_heads * model.head_size // dp) * d


def _recomputed(stream: int, sequence_parallel: bool, compile: bool, add) -> None:
    # The sum at the end of a block is not needed again; only a compiled block makes it.
    leaves, why = (2 if compile else 1), "activations, computed again"
    if sequence_parallel:
        add("block", "tp", "all_gather", why, 2, stream)
        add("block", "tp", "reduce_scatter", why, leaves, stream)
    else:
        add("block", "tp", "all_reduce", why, leaves, stream)


def _chunks(length: int, count: int) -> list[int]:
    """Lengths into which ``torch.chunk`` cuts."""
    size = -(-length // count)
    return [min(size, length - start) for start in range(0, length, size)]


def _compressed(model: LlamaConfig, compression: str) -> list[tuple[str, int]]:
    """(what is sent of all gradients, its elements), summed over the buckets."""
    if compression != "powersgd":
        return [(compression, model.num_parameters)]
    shapes = model.parameter_shapes.values()
    factored = [shape for shape in shapes if powersgd_compresses(shape)]
    whole = model.num_parameters - sum(map(math.prod, factored))
    return [
        ("vectors and small matrices", whole),
        ("factors P", POWERSGD_RANK * sum(rows for rows, _ in factored)),
        ("factors Q", POWERSGD_RANK * sum(columns for _, columns in factored)),
    ]


def _fsdp_units(model: LlamaConfig, layout: Layout) -> list[tuple[str, int, int]]:
    """(unit, elements of a tp rank with FSDP2's padding, gathers per communicating backward)."""
    tp, d, head, dp = layout.tp, model.hidden_size, model.head_size, layout.shards

    def padded(rows: int, columns: int = 1) -> int:
        return -(-rows // dp) * dp * columns

    q, f = model.num_attention_heads * head // tp, model.intermediate_size // tp
    kv = model.kv_heads * head // (tp if model.kv_heads % tp == 0 else 1)
    matrices = padded(q, d) + 2 * padded(kv, d) + padded(d, q) + 2 * padded(f, d) + padded(d, f)
    block = matrices + 2 * padded(d)
    rows = -(-model.vocab_size // tp)
    # An uneven vocabulary is cut over dp by columns.
    table = padded(rows, d) if model.vocab_size % tp == 0 else rows * d
    again = 2 if layout.zero == 3 else 1
    if model.tie_word_embeddings:
        return [("block", block, again), ("embedding, norm and head", table + padded(d), 1)]
    # The backward of the embedding does not need the table; the head is kept for its backward.
    return [("block", block, again), ("embedding", table, 1), ("head", table + padded(d), 1)]


def describe_pipeline(layout: Layout) -> str:
    """Schedule, micro-batches and bubble in a line."""
    m = layout.micro_batches
    bubble = bubble_fraction(layout.pp_schedule, layout.pp, m)
    return (
        f"pipeline {layout.pp_schedule}: {m} micro-batches, {bubble:.1%} of a step is bubble "
        "(if a backward takes twice a forward, and stages are equal)"
    )


def _stage_lines(model: LlamaConfig, layout: Layout, seq_len: int) -> list[str]:
    table = [("stage", "pp rank", "holds", "parameters")]
    numel = {name: math.prod(shape) for name, shape in model.parameter_shapes.items()}
    for stage in layout.stages(model, seq_len):
        holds = f"blocks {stage.blocks.start} to {stage.blocks.stop - 1}"
        parts = [f"model.layers.{i}." for i in stage.blocks]
        if stage.first:
            holds, parts = f"embedding, {holds}", [*parts, "model.embed_tokens."]
        if stage.last:
            holds, parts = f"{holds}, norm, head", [*parts, "model.norm.", "lm_head."]
        size = sum(n for name, n in numel.items() if name.startswith(tuple(parts)))
        table.append((stage.index, stage.pp_rank, holds, f"{size:,}"))
    return [describe_pipeline(layout), "", *columns(table), ""]


def _block(row: ParameterRow) -> int | None:
    number = re.match(r"model\.layers\.(\d+)\.", row.name)
    return int(number[1]) if number else None


def _equal_blocks_once(rows: list[ParameterRow]) -> list[ParameterRow]:
    """The rows, with one block for all that follow it and are equal, as ``model.layers.0-31``."""
    groups = []  # first and last block, and the rows of each, named within it
    for number, block in itertools.groupby(rows, _block):
        parts = [replace(x, name=x.name.removeprefix(f"model.layers.{number}.")) for x in block]
        if groups and number is not None and groups[-1][1:] == [number - 1, parts]:
            groups[-1][1] = number
        else:
            groups.append([number, number, parts])
    shown = []
    for first, last, parts in groups:
        numbers = f"{first}" if first == last else f"{first}-{last}"
        prefix = "" if first is None else f"model.layers.{numbers}."
        shown += [replace(row, name=prefix + row.name) for row in parts]
    return shown


def format_plan(
    rows: list[ParameterRow],
    sent: dict[int, list[Collective]],
    model: LlamaConfig,
    layout: Layout,
    seq_len: int,
) -> str:
    """The tables as text; S(d) is a shard of dim d, R a replica. Equal blocks are shown once.

    Args:
        rows: parameters of rank 0.
        sent: collectives of a rank, by its coordinate in pp.
    """
    lines = [f"layout {layout.name}, rank 0 of {layout.world_size}", ""]
    if layout.pp > 1:
        lines += _stage_lines(model, layout, seq_len)
    # Neither cuts a parameter: pp shares them out whole, and cp counts as dp.
    hidden = {"cp", "pp"} | ({"tp"} if layout.tp == 1 else set())
    dims = " ".join(d for d in layout.mesh_dims if d not in hidden)
    dims = dims.replace(" dp", " dp x cp") if layout.cp > 1 else dims
    table = [("parameter", "global shape", dims, "local shape", "bytes each")]
    table += [
        (r.name, r.shape, r.placements, r.local_shape, f"{r.bytes:,}")
        for r in _equal_blocks_once(rows)
    ]
    lines += columns(table)
    total = sum(row.bytes for row in rows)
    lines += ["", f"total {total:,} bytes of {model.num_parameters:,} parameters on this rank", ""]
    for pp_rank, found in sent.items():
        table = [("unit", "dim", "collective", "per step", "bytes each", "what")]
        for c in found:
            unit = f"block (each of {c.units})" if c.unit == "block" else c.unit
            table.append((unit, c.dim, c.kind, c.count, f"{c.bytes:,}", c.why))
        if layout.pp > 1:
            lines += [f"ranks of pp {pp_rank}", ""]
        lines += [*(columns(table) if found else ["no collectives within the step"]), ""]
    return "\n".join(lines[:-1])
