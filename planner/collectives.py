"""The collectives of one optimizer step, by formula. Torch-free."""

import collections
import math
from collections.abc import Sequence
from dataclasses import dataclass

from models.config import LlamaConfig
from models.weights import (
    Weight,
    block_activations,
    block_weights,
    embedding_weight,
    head_weights,
)
from parallel.layout import POWERSGD_RANK, Layout, powersgd_compresses
from parallel.options import ParallelOptions, checkpointed
from parallel.stages import Stage

FORWARD_AND_BACKWARD = "activations, forward and backward"


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
        units: how many such units of the rank do it: its blocks, those that are checkpointed, or 1.
    """

    unit: str
    dim: str
    kind: str
    why: str
    count: int
    bytes: int
    units: int


def collectives(
    model: LlamaConfig,
    layout: Layout,
    options: ParallelOptions,
    seq_len: int,
    stages: Sequence[Stage] = (),
) -> list[Collective]:
    """The collectives of one optimizer step, as :func:`parallel.parallelize` arranges them.

    With ``stages``, those of a rank that holds these stages of a pipeline.

    With ``grad_compression`` a row stands for all buckets of gradients together; PowerSGD's first
    steps send them whole. Left out: one all-reduce of two numbers over all ranks (loss and
    gradient norm), and one of a small CPU vector (target tokens, stop requested).
    """
    step = _Step(model, layout, options, seq_len, stages)
    if layout.tp > 1:
        step.tensor_parallel()
    if layout.cp > 1:
        step.context_parallel()
    if options.grad_compression != "none" and layout.world_size > 1:
        step.compressed_gradients()
    else:
        step.data_parallel()
    if stages:
        step.pipeline()
    return [row for row in step.rows if row.unit in step.units]


class _Step:
    """Gathers the rows of :func:`collectives`.

    Attributes:
        units: parts of the model that the rank has.
    """

    def __init__(
        self,
        model: LlamaConfig,
        layout: Layout,
        options: ParallelOptions,
        seq_len: int,
        stages: Sequence[Stage],
    ):
        self.model, self.layout, self.options, self.stages = model, layout, options, stages
        self.rows: list[Collective] = []
        self.local_len = seq_len // layout.cp
        self.tokens = layout.micro_batch_size * self.local_len
        # [B, S / cp, D]
        self.stream = self.tokens * model.hidden_size * options.dtype_bytes
        # Of gradients, and of the numbers of the loss.
        self.reduced_bytes = max(options.dtype_bytes, 4)
        numbers = [range(model.num_hidden_layers)] if not stages else [s.blocks for s in stages]
        self.blocks = sum(map(len, numbers))
        mode = options.activation_checkpoint
        self.checkpointed = sum(checkpointed(blocks, mode) for blocks in numbers)
        self.last = not stages or any(stage.last for stage in stages)
        self.units = {"block", "all", "stage"}
        if not stages or any(stage.first for stage in stages):
            self.units |= {"embedding", "embedding, norm and head"}
        if self.last:
            self.units |= {"head", "loss", "embedding, norm and head"}

    def add(
        self,
        place: tuple[str, str, str],
        why: str,
        size: int,
        count: int = 1,
        *,
        times: int | None = None,
        units: int | None = None,
    ) -> None:
        """Add a row.

        Args:
            place: unit, dim and kind.
            times: how often a step has ``count`` of them; None: in each micro-batch.
            units: how many such units do it; None: all blocks of the rank, or 1.
        """
        times = self.layout.micro_batches if times is None else times
        if units is None:
            units = self.blocks if place[0] == "block" else 1
        if units and count:
            self.rows.append(Collective(*place, why, count * times, size, units))

    def tensor_parallel(self) -> None:
        """Boundaries of regions, partial gradients, and the loss."""
        regions = sum(w.sharding == "row" for w in block_weights(self.model))
        sequence_parallel, stream = self.options.sequence_parallel, self.stream
        # (unit, inputs that enter a region, outputs that leave one)
        for unit, enter, leave in (
            ("block", regions, regions),
            ("embedding", 0, 1),
            ("head", 1, 0),
        ):
            if sequence_parallel:
                for kind in ("all_gather", "reduce_scatter"):
                    self.add((unit, "tp", kind), FORWARD_AND_BACKWARD, stream, enter + leave)
                continue
            for count, when in ((leave, "forward"), (enter, "backward")):
                if count:
                    self.add((unit, "tp", "all_reduce"), f"activations, {when}", stream, count)
        if numel := self._partial_gradients():
            why, size = "gradients of replicated weights", numel * self.reduced_bytes
            self.add(("all", "tp", "all_reduce"), why, size, times=1)
        # The sum at the end of a block is not needed again; only a compiled block makes it.
        sums, again = regions - (not self.options.compile), "activations, computed again"
        if sequence_parallel:
            gathers = ("block", "tp", "all_gather")
            self.add(gathers, again, stream, regions, units=self.checkpointed)
        kind = "reduce_scatter" if sequence_parallel else "all_reduce"
        self.add(("block", "tp", kind), again, stream, sums, units=self.checkpointed)
        for length, count in collections.Counter(self._loss_chunks()).items():
            size = self.layout.micro_batch_size * length * self.reduced_bytes
            place = ("loss", "tp", "all_reduce")
            self.add(place, "largest logit of each token", size, count)
            self.add(place, "sum of exp, target logit", 2 * size, count)

    def _loss_chunks(self) -> list[int]:
        return chunk_lengths(self.local_len, self.options.loss_chunks)

    def _partial_gradients(self) -> int:
        """Elements of dp shards whose gradients are parts of sums over tp, on the first rank."""
        layout, sequence_parallel = self.layout, self.options.sequence_parallel

        def numel(weights: Sequence[Weight]) -> int:
            shapes = [w.shape for w in weights if w.has_partial_grad(layout.tp, sequence_parallel)]
            return sum(-(-rows // layout.shards) * math.prod(rest) for rows, *rest in shapes)

        block = numel(block_weights(self.model))
        return self.blocks * block + (numel(head_weights(self.model)) if self.last else 0)

    def context_parallel(self) -> None:
        """Keys and values of the whole sequence."""
        kept = [a for a in block_activations(self.model) if a.whole_sequence]
        width = sum(activation.local_width(self.layout.tp) for activation in kept)
        size = self.layout.cp * self.tokens * width * self.options.dtype_bytes
        gathers = ("block", "cp", "all_gather")
        self.add(gathers, "keys and values", size)
        self.add(gathers, "keys and values, again", size, units=self.checkpointed)
        self.add(("block", "cp", "reduce_scatter"), "gradients of keys and values", size)

    def compressed_gradients(self) -> None:
        """What DDP's hooks send instead of whole gradients."""
        compression = self.options.grad_compression
        each = self.reduced_bytes if compression == "powersgd" else 2
        for why, numel in _compressed(self.model, compression):
            self.add(("all", "dp", "all_reduce"), f"gradients: {why}", numel * each, times=1)

    def data_parallel(self) -> None:
        """FSDP2's gathers and reductions."""
        layout = self.layout
        shards, replicas = layout.shards, layout.replicas
        dim = "dp x cp" if layout.cp > 1 else "dp"
        # ZeRO-1 and 0 first sum over the micro-batches.
        times = layout.micro_batches if layout.zero >= 2 else 1
        for unit, numel, gathers in fsdp_units(self.model, layout):
            reduced = numel * self.reduced_bytes
            if shards > 1:
                gathered = numel * self.options.dtype_bytes
                self.add((unit, dim, "all_gather"), "parameters", gathered, gathers, times=times)
                self.add((unit, dim, "reduce_scatter"), "gradients", reduced, times=times)
            if replicas > 1:
                place, size = (unit, "dp_replicate", "all_reduce"), numel // shards
                size *= self.reduced_bytes
                self.add(place, "gradients of a shard", size, times=1)

    def pipeline(self) -> None:
        """What crosses the ends of the stages of a rank, once a micro-batch."""
        here = {stage.index for stage in self.stages}
        size = self.stream // (self.layout.tp if self.options.sequence_parallel else 1)
        for stage in self.stages:
            # Neighbours on one rank, as in the middle of a V, hand over in memory.
            if not stage.first and (before := stage.index - 1) not in here:
                self.add(("stage", "pp", "recv"), f"hidden states from stage {before}", size)
                self.add(("stage", "pp", "send"), f"their gradients to stage {before}", size)
            if not stage.last and (after := stage.index + 1) not in here:
                self.add(("stage", "pp", "send"), f"hidden states to stage {after}", size)
                self.add(("stage", "pp", "recv"), f"their gradients from stage {after}", size)


def chunk_lengths(length: int, count: int) -> list[int]:
    """Lengths of the parts that ``torch.chunk`` makes."""
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


def unit_numel(weights: Sequence[Weight], layout: Layout) -> int:
    """Elements of an FSDP unit on the first tp rank, with FSDP2's padding."""
    total = 0
    for weight in weights:
        rows, *columns = weight.local_shape(layout.tp)
        # An uneven vocabulary is sharded over dp by columns.
        if weight.sharding != "vocabulary" or weight.shape[0] % layout.tp == 0:
            rows = -(-rows // layout.shards) * layout.shards
        total += rows * math.prod(columns)
    return total


def fsdp_units(model: LlamaConfig, layout: Layout) -> list[tuple[str, int, int]]:
    """(unit, elements of :func:`unit_numel`, gathers per communicating backward)."""
    block = ("block", unit_numel(block_weights(model), layout), 2 if layout.zero == 3 else 1)
    embedding, head = [embedding_weight(model)], head_weights(model)
    if model.tie_word_embeddings:
        return [block, ("embedding, norm and head", unit_numel([*embedding, *head], layout), 1)]
    # The backward of the embedding does not need the table; the head is kept for its backward.
    ends = ("embedding", embedding), ("head", head)
    return [block, *((name, unit_numel(weights, layout), 1) for name, weights in ends)]
