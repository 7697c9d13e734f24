"""Bytes that a rank holds, by formula. Torch-free.

Symbols: T tokens of a micro-batch on a rank, D hidden, q, k and f the local widths of queries, keys
and feed-forward, h local query heads, V local rows of the vocabulary, u the part of the stream that
a rank keeps (1, or 1/tp with sequence parallelism), c bytes of the compute dtype, and s those of
what is computed in float32 or better.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from models.config import LlamaConfig
from models.weights import Activation, block_activations, norm_activations
from parallel.layout import Layout
from parallel.options import ParallelOptions, checkpointed
from parallel.stages import SCHEDULES, Stage
from planner.collectives import chunk_lengths, fsdp_units

# Of one rank, in the order of a report.
ITEMS = {
    "parameters": "shards of the parameters",
    "gradients": "shards of their gradients",
    "optimizer": "AdamW's two moments",
    "gathered": "parameters gathered to compute with",
    "unsharded_gradients": "gradients before they are reduced and sharded",
    "activations": "kept for the backward, of all micro-batches in flight",
    "buffers": "where a pipeline receives",
    "loss": "logits and what the loss makes of them",
    "working": "one block computed again, and its backward",
}


@dataclass(frozen=True, kw_only=True)
class Options(ParallelOptions):
    """What decides about memory and time beside model and layout.

    What compiled blocks keep less is not counted on, and compressed gradients are not planned.

    Attributes:
        seq_len: tokens of a whole sequence.
        moment_bytes: of an element of one of AdamW's moments; 0 for SGD.
        cuda: attention is a kernel of CUDA's; with context parallelism a CPU's keeps more.
    """

    seq_len: int
    moment_bytes: int = 4
    cuda: bool = True

    @property
    def wide_bytes(self) -> int:
        """Bytes of a number that is kept in float32 or better."""
        return max(4, self.dtype_bytes)


@dataclass(frozen=True)
class Memory:
    """Bytes of the largest moment of a step on the ranks of a pipeline coordinate; see ITEMS.

    Gradients and all activations are counted together, although activations are freed while
    gradients arrive: these are made on another stream, and CUDA's caching allocator gives no stream
    what another has freed. The loss is over when the backward of the blocks begins.
    """

    parameters: int
    gradients: int
    optimizer: int
    gathered: int
    unsharded_gradients: int
    activations: int
    buffers: int
    loss: int
    working: int

    @property
    def total(self) -> int:
        """The larger of loss and working set, and all the rest."""
        states = self.parameters + self.gradients + self.optimizer
        whole = self.gathered + self.unsharded_gradients
        return states + whole + self.activations + self.buffers + max(self.loss, self.working)

    @property
    def largest(self) -> str:
        """The name of the largest item."""
        return max(ITEMS, key=vars(self).__getitem__)


class Holding(NamedTuple):
    """What the ranks at a coordinate of pp have: the number of blocks, whether the embedding and
    the head, and of each stage its blocks, those of them that are checkpointed, and the ends."""

    pp_rank: int
    blocks: int
    first: bool
    last: bool
    stages: tuple[tuple[int, int, bool, bool], ...]


def holding(model: LlamaConfig, stages: Sequence[Stage], mode: str = "none") -> Holding:
    """Of the ranks that hold ``stages`` of a pipeline, in order; without any, the whole model.

    Args:
        mode: of activation checkpointing.
    """
    stages = stages or [Stage(0, 1, 0, range(model.num_hidden_layers))]
    parts = tuple((len(s.blocks), checkpointed(s.blocks, mode), s.first, s.last) for s in stages)
    ends = stages[0].first, stages[-1].last
    return Holding(stages[0].pp_rank, sum(part[0] for part in parts), *ends, parts)


def unit_sizes(model: LlamaConfig, layout: Layout) -> tuple[int, int, int]:
    """Elements of a tp rank, with FSDP2's padding: of a block, of the embedding, of norm and head;
    a tied embedding counts with the head."""
    units = {name: numel for name, numel, _ in fsdp_units(model, layout)}
    if model.tie_word_embeddings:
        return units["block"], 0, units["embedding, norm and head"]
    return units["block"], units["embedding"], units["head"]


def stage_parameters(model: LlamaConfig, layout: Layout, stages: Sequence[Stage] = ()) -> int:
    """Elements on the first tp rank that FSDP2 shards, with its padding.

    Of the ranks that hold ``stages`` of a pipeline, in order; without any, of the whole model. A
    table with an uneven vocabulary counts with the rows of the first rank, and replicated keys and
    values with all theirs.
    """
    block, embedding, head = unit_sizes(model, layout)
    here = holding(model, stages)
    return here.blocks * block + here.first * embedding + here.last * head


def _tokens(layout: Layout, options: Options) -> tuple[int, int]:
    """T and uT."""
    tokens = layout.micro_batch_size * options.seq_len // layout.cp
    return tokens, tokens // (layout.tp if options.sequence_parallel else 1)


def _kept(activations: Sequence[Activation], layout: Layout, options: Options) -> int:
    """Bytes of what is kept of a micro-batch."""
    tokens, stream = _tokens(layout, options)
    total = 0
    for kept in activations:
        of = stream if kept.sharding == "stream" else tokens * (layout.cp**kept.whole_sequence)
        size = options.wide_bytes if kept.wide else options.dtype_bytes
        total += of * kept.local_width(layout.tp) * size
    return total


def block_bytes(model: LlamaConfig, layout: Layout, options: Options) -> int:
    """Bytes that the forward of a block leaves for its backward, per micro-batch: the table of
    activations, or its input alone if it is checkpointed (``options`` say "full").

    On a CPU attention with context parallelism keeps a mask for its later queries (of the first
    rank); on CUDA each attention keeps 24 bytes of a random state. Equal to what is measured on a
    CPU, and on fake tensors with the operations of CUDA (tests); not run there. A compiled block
    keeps no more.
    """
    if options.activation_checkpoint == "full":
        return checkpointed_bytes(model, layout, options)
    kept, cp = _kept(block_activations(model), layout, options), layout.cp
    if options.cuda:
        return kept + 24 * (1 if cp == 1 else 2)
    mask = options.seq_len * options.seq_len // (2 * cp) if cp > 1 else 0
    return kept + options.dtype_bytes * mask


def checkpointed_bytes(model: LlamaConfig, layout: Layout, options: Options) -> int:
    """Bytes that a checkpointed block keeps per micro-batch: its input."""
    return options.dtype_bytes * _tokens(layout, options)[1] * model.hidden_size


def embedding_bytes(layout: Layout, options: Options) -> int:
    """Bytes that an embedding keeps per micro-batch: row and mask of each token, if it is sharded.

    Its result is the input of the first block.
    """
    return 9 * _tokens(layout, options)[0] if layout.tp > 1 else 0


def head_bytes(model: LlamaConfig, layout: Layout, options: Options) -> int:
    """Bytes that the last norm and the head keep per micro-batch, without the loss.

    With a loss in chunks the gradient of the head's input takes its place.
    """
    tokens = _tokens(layout, options)[0]
    norm = _kept(norm_activations(model), layout, options)
    return norm + options.dtype_bytes * tokens * model.hidden_size


def loss_bytes(model: LlamaConfig, layout: Layout, options: Options) -> tuple[int, int]:
    """Bytes that the loss keeps for its backward, and its largest, per micro-batch.

    Whole, it keeps the softmax in s, and 10 bytes a token of rows and masks; at its largest the
    backward has made of it the gradient of the logits, in s and in c. In chunks it keeps the
    gradient of the weight in c; at its largest it holds that in s, and of a chunk the logits, the
    softmax and its gradient in s and c, and the gradient of the chunk before; or, where chunks are
    small, what a chunk adds to the gradient of the weight. After either the gradient of the head is
    whole in c and in float32, as it is reduced.
    """
    c, s, d = options.dtype_bytes, options.wide_bytes, model.hidden_size
    tokens, rows = _tokens(layout, options)[0], -(-model.vocabulary // layout.tp)
    table, again = rows * d, c if c < s else 0
    if options.loss_chunks == 1:
        kept = (s * rows + 10) * tokens
        return kept, max(kept + (s + again) * rows * tokens, (c + s) * table)
    length = chunk_lengths(options.seq_len // layout.cp, options.loss_chunks)[0]
    length *= layout.micro_batch_size
    logits, adding = (2 * c + 2 * s + again) * rows * length, c * (table + 2 * rows * length)
    return c * table, max(s * table + c * d * tokens + max(logits, adding), (c + s) * table)


def working_bytes(model: LlamaConfig, layout: Layout, options: Options) -> int:
    """Bytes of a block's backward beside what its forward kept: what is computed again, and the
    gradients of three tensors of the feed-forward and two of the stream at a time."""
    tokens, f, again = _tokens(layout, options)[0], model.intermediate_size // layout.tp, 0
    if options.activation_checkpoint != "none":
        whole = block_bytes(model, layout, replace(options, activation_checkpoint="none"))
        again = max(0, whole - checkpointed_bytes(model, layout, options))
    return again + options.dtype_bytes * tokens * (3 * f + 2 * model.hidden_size)


def in_flight(schedule: str, pp: int, pp_rank: int, micro_batches: int) -> tuple[int, ...]:
    """Micro-batches whose activations a rank holds at its largest moment, for each of its stages.

    Of torch's schedules; GPipe runs all forwards first (Huang et al. 2019), 1F1B as many as stages
    follow (Narayanan et al. 2019), the interleaved one a round more (2021); the V-shaped ones hold
    a stage until the gradients of its weights are made (Qi et al. 2024).
    """
    behind = pp - pp_rank
    if schedule == "gpipe":
        return (micro_batches,)
    if schedule == "1f1b":
        return (min(micro_batches, behind),)
    if schedule == "interleaved":
        first = min(micro_batches, max(pp, 2 * behind - 1))
        return first, min(micro_batches, pp + 2 * behind - 1 - first)
    return (pp + behind - 1 + (schedule == "dualpipev"), pp_rank + 1)


def receiving(schedule: str, pp: int) -> int:
    """Buffers that a rank receives into at once, at most: neighbours may send ahead.

    Of torch's schedules, with buffers that live until they are computed with
    (``parallel/pipeline.py``).
    """
    return {"gpipe": 1, "1f1b": 1, "interleaved": max(3, pp)}.get(schedule, 4)


class MicroBatch(NamedTuple):
    """Bytes that do not depend on the pipeline or on dp: of a block that keeps all, of a
    checkpointed one, of the embedding, of norm and head, of what crosses between stages, what the
    loss keeps, its largest, and a block's backward."""

    block: int
    checkpointed: int
    embedding: int
    head: int
    boundary: int
    loss_kept: int
    loss: int
    working: int


def micro_batch_bytes(model: LlamaConfig, layout: Layout, options: Options) -> MicroBatch:
    """Of one micro-batch."""
    kept, largest = loss_bytes(model, layout, options)
    return MicroBatch(
        block=block_bytes(model, layout, replace(options, activation_checkpoint="none")),
        checkpointed=checkpointed_bytes(model, layout, options),
        embedding=embedding_bytes(layout, options),
        head=head_bytes(model, layout, options),
        boundary=options.dtype_bytes * _tokens(layout, options)[1] * model.hidden_size,
        loss_kept=kept,
        loss=largest,
        working=working_bytes(model, layout, options),
    )


def stage_bytes(stage: tuple[int, int, bool, bool], micro: MicroBatch) -> int:
    """Bytes that a micro-batch leaves in a stage of a :class:`Holding`, without the loss; a stage
    that others follow keeps what it has handed on."""
    blocks, again, first, last = stage
    total = (blocks - again) * micro.block + again * micro.checkpointed + first * micro.embedding
    return total + (micro.head if last else micro.boundary)


def memory(
    model: LlamaConfig, layout: Layout, options: Options, stages: Sequence[Stage] = ()
) -> Memory:
    """What the ranks that hold ``stages`` hold at most; without any, those of the whole model."""
    here = holding(model, stages, options.activation_checkpoint)
    micro = micro_batch_bytes(model, layout, options)
    return rank_memory(layout, options, here, unit_sizes(model, layout), micro)


def rank_memory(
    layout: Layout,
    options: Options,
    here: Holding,
    units: tuple[int, int, int],
    micro: MicroBatch,
) -> Memory:
    """As :func:`memory`, from what other ranks and layouts have in common.

    FSDP2 (``parallel/data_parallel.py``): ZeRO-3 gathers the block that computes and the next, and
    keeps the head; ZeRO-2 keeps all blocks gathered, too, and ZeRO-1 and 0 also the embedding, and
    whole gradients in float32. A single dp rank computes with what it stores, unless FSDP2 casts or
    offloads.

    Args:
        units: of :func:`unit_sizes`.
    """
    c, s, zero = options.dtype_bytes, options.wide_bytes, layout.zero
    block, embedding, head = units[0], here.first * units[1], here.last * units[2]
    whole = here.blocks * block + embedding + head
    stored = 0 if options.cpu_offload else whole // layout.shards
    alone = layout.shards * layout.replicas == 1
    plain = alone and c == s and not options.cpu_offload  # then there is no FSDP2
    if plain:
        gathered = 0
    elif zero == 3:
        ahead = 1 if options.prefetch is None else options.prefetch
        gathered = min(here.blocks, 1 + ahead) * block + head
    else:
        gathered = whole - (embedding if zero == 2 else 0)
    unsharded = (c + s) * block if zero >= 2 else s * (whole + block)
    if layout.pp > 1 and c < s and SCHEDULES[layout.pp_schedule].splits_backward:
        # Of weights, as they are computed: FSDP2 adds them to those in s at its next backward.
        unsharded = max(unsharded, (c + s) * whole)
    flights: tuple[int, ...] = (1,)
    buffers = 0
    if layout.pp > 1:
        schedule, m = layout.pp_schedule, layout.micro_batches
        # What was received is then the first input of a stage, and what goes on stays.
        flights = in_flight(schedule, layout.pp, here.pp_rank, m)
        buffers = receiving(schedule, layout.pp)
    return Memory(
        parameters=s * stored,
        gradients=s * stored,
        optimizer=2 * options.moment_bytes * stored,
        gathered=c * gathered,
        unsharded_gradients=0 if plain else unsharded,
        activations=sum(
            count * stage_bytes(stage, micro)
            for count, stage in zip(flights, here.stages, strict=True)
        ),
        buffers=micro.boundary * buffers,
        loss=(flights[-1] - 1) * micro.loss_kept + micro.loss if here.last else 0,
        working=micro.working,
    )
