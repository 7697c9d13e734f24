"""``--print-plan``: what a layout holds and sends, as text.

Torch-free, but for what looks at a model.
"""

import itertools
import math
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

from common.text import columns
from models.config import LlamaConfig
from parallel.layout import Layout
from parallel.stages import bubble_fraction
from planner.collectives import Collective

if TYPE_CHECKING:
    from torch.distributed.tensor.placement_types import Placement, Shard

    from models.decoder import Llama


@dataclass(frozen=True)
class ParameterRow:
    """One parameter on this rank; ``bytes`` are those of the local shard in its stored dtype."""

    name: str
    shape: tuple[int, ...]
    placements: str
    local_shape: tuple[int, ...]
    bytes: int


def _short(placement: "Placement") -> str:
    # FSDP2's _StridedShard shards the dim that tp has sharded first; for a reader it is a shard.
    return "R" if placement.is_replicate() else f"S({cast('Shard', placement).dim})"


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


def describe_pipeline(layout: Layout) -> str:
    """Schedule, micro-batches and bubble in a line."""
    m = layout.micro_batches
    bubble = bubble_fraction(layout.pp_schedule, layout.pp, m)
    return (
        f"pipeline {layout.pp_schedule}: {m} micro-batches, {bubble:.1%} of a step is bubble "
        "(if a backward takes twice a forward, and stages are equal)"
    )


def _stage_lines(model: LlamaConfig, layout: Layout, seq_len: int) -> list[str]:
    table: list[tuple[object, ...]] = [("stage", "pp rank", "holds", "parameters")]
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
    # First and last block, and the rows of each, named within it.
    groups: list[tuple[int | None, int | None, list[ParameterRow]]] = []
    for number, block in itertools.groupby(rows, _block):
        parts = [replace(x, name=x.name.removeprefix(f"model.layers.{number}.")) for x in block]
        if groups and number is not None and groups[-1][1:] == (number - 1, parts):
            groups[-1] = groups[-1][0], number, parts
        else:
            groups.append((number, number, parts))
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
    # Neither shards a parameter: pp places them whole, and cp counts as dp.
    hidden = {"cp", "pp"} | ({"tp"} if layout.tp == 1 else set())
    dims = " ".join(d for d in layout.mesh_dims if d not in hidden)
    dims = dims.replace(" dp", " dp x cp") if layout.cp > 1 else dims
    table: list[tuple[object, ...]]
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
