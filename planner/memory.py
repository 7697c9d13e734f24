"""Bytes that a rank holds, by formula. Torch-free.

Symbols: T tokens of a micro-batch on a rank, D hidden, q, k and f the local widths of queries, keys
and feed-forward, h local query heads, V local rows of the vocabulary, u the part of the stream that
a rank keeps (1, or 1/tp with sequence parallelism), c bytes of the compute dtype, and s those of
what is computed in float32 or better.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from models.config import LlamaConfig
from parallel.layout import Layout
from parallel.stages import SCHEDULES, Stage
from planner.collectives import DTYPE_BYTES, _chunks, _fsdp_units

if TYPE_CHECKING:
    from training.config.schema import Config

# Of one rank, in the order of a report.
ITEMS = {
    "parameters": "shards of the parameters",
    "gradients": "shards of their gradients",
    "optimizer": "AdamW's two moments",
    "gathered": "parameters gathered to compute with",
    "unsharded_gradients": "gradients before they are shared out",
    "activations": "kept for the backward, of all micro-batches in flight",
    "buffers": "where a pipeline receives",
    "loss": "logits and what the loss makes of them",
    "working": "one block computed again, and its backward",
}


@dataclass(frozen=True)
class Options:
    """What decides about memory beside model and layout.

    Attributes:
        seq_len: tokens of a whole sequence.
        dtype_bytes: of the compute dtype; parameters are stored in 4, or 8 with 8.
        prefetch: blocks gathered ahead; None is FSDP2's own, at most one.
        moment_bytes: of an element of one of AdamW's moments; 0 for SGD.
        compile: blocks are compiled; what they then keep less is not counted on.
        cuda: attention is a kernel of CUDA's; with context parallelism a CPU's keeps more.
    """

    seq_len: int
    sequence_parallel: bool = False
    activation_checkpoint: str = "none"
    loss_chunks: int = 1
    dtype_bytes: int = 2
    prefetch: int | None = None
    moment_bytes: int = 4
    cpu_offload: bool = False
    compile: bool = False
    cuda: bool = True


def memory_options(config: "Config", cuda: bool = True) -> Options:
    """What of a training decides about memory, beside the layout.

    Args:
        cuda: whether it runs on CUDA, where sequence parallelism is on by itself.
    """
    size, optimizer = DTYPE_BYTES[config.step.dtype], config.optimizer
    stored = 2 if optimizer.optimizer_state_dtype == "bfloat16" else max(4, size)
    return Options(
        seq_len=config.step.seq_len,
        sequence_parallel=config.plan_options(cuda=cuda)["sequence_parallel"],
        activation_checkpoint=config.memory.activation_checkpoint,
        loss_chunks=config.memory.loss_chunks,
        dtype_bytes=size,
        prefetch=config.memory.prefetch,
        moment_bytes=stored if optimizer.optimizer == "adamw" else 0,
        cpu_offload=config.memory.cpu_offload,
        compile=config.memory.compile,
        cuda=cuda,
    )


@dataclass(frozen=True)
class Facts:
    """What another trainer does in another way, to compare published numbers; ours by default.

    Attributes:
        logit_bytes: largest bytes per local logit in the loss.
        block_bytes: as :func:`block_bytes`, of its blocks.
        stream_bytes: what norms and residual stream of a block read and write per element and
            forward, in 16 bits.
        bubble: part of a step in which pipeline ranks wait.
    """

    logit_bytes: float | None = None
    block_bytes: Callable[[LlamaConfig, Layout, Options], int] | None = None
    stream_bytes: int = 28
    bubble: float | None = None


OURS = Facts()


@dataclass(frozen=True)
class Memory:
    """Bytes of the largest moment of a step on the ranks of a pipeline coordinate; see ITEMS.

    ``gradients``, whole ones and all activations are counted together, though the one come as the
    others go: they are made on another stream, and CUDA's caching allocator gives no stream what
    another has freed. The loss is over when the backward of the blocks begins.
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
        return max(ITEMS, key=vars(self).get)


class Holding(NamedTuple):
    """Of a rank: its coordinate in pp, number of blocks, whether the embedding and the head are
    there, and the same three of each stage."""

    pp_rank: int
    blocks: int
    first: bool
    last: bool
    stages: tuple[tuple[int, bool, bool], ...]


def holding(model: LlamaConfig, stages: Sequence[Stage]) -> Holding:
    """Of the ranks that hold ``stages`` of a pipeline, in order; without any, the whole model."""
    if not stages:
        whole = model.num_hidden_layers, True, True
        return Holding(0, *whole, (whole,))
    parts = tuple((len(stage.blocks), stage.first, stage.last) for stage in stages)
    return Holding(stages[0].pp_rank, sum(n for n, _, _ in parts), parts[0][1], parts[-1][2], parts)


def unit_sizes(model: LlamaConfig, layout: Layout) -> tuple[int, int, int]:
    """Elements of a tp rank, with FSDP2's padding: of a block, of the embedding, of norm and head;
    a tied embedding counts with the head."""
    units = {name: numel for name, numel, _ in _fsdp_units(model, layout)}
    if model.tie_word_embeddings:
        return units["block"], 0, units["embedding, norm and head"]
    return units["block"], units["embedding"], units["head"]


def stage_parameters(model: LlamaConfig, layout: Layout, stages: Sequence[Stage] = ()) -> int:
    """Elements on the first tp rank that FSDP2 shares out, as it pads them to its shards.

    Of the ranks that hold ``stages`` of a pipeline, in order; without any, of the whole model. A
    table with an uneven vocabulary counts with the rows of the first rank, and replicated keys and
    values with all theirs.
    """
    block, embedding, head = unit_sizes(model, layout)
    held = holding(model, stages)
    return held.blocks * block + held.first * embedding + held.last * head


def _widths(model: LlamaConfig, layout: Layout) -> tuple[int, int, int, int]:
    """Local q, k, f and h."""
    tp, head = layout.tp, model.head_size
    kv = model.kv_heads // tp if model.kv_heads % tp == 0 else 1
    h = model.num_attention_heads // tp
    return h * head, kv * head, model.intermediate_size // tp, h


def _tokens(layout: Layout, options: Options) -> tuple[int, int]:
    """T and uT."""
    tokens = layout.batch_size * options.seq_len // layout.cp
    return tokens, tokens // (layout.tp if options.sequence_parallel else 1)


def block_bytes(model: LlamaConfig, layout: Layout, options: Options) -> int:
    """Bytes that the forward of a block leaves for its backward, per micro-batch.

    - none: input and inverse root of the two norms, c 2uTD + s 2uT; the inputs of the two regions,
      c 2TD; queries, keys, values and log-sum-exp of attention, c (q + 2k)T + s hT, and twice its
      result, by heads and by tokens, c 2qT; and c 2fT of SwiGLU, gate and up. Context parallelism
      keeps the keys and values of the whole sequence.
    - full: the input, c uTD.
    - selective: that, the results of the matrix products, c (q + 2k + 2f + 2D)T, of attention,
      c qT + s hT, and of the collectives: c 2TD, or c (2TD + 2uTD) with sequence parallelism, and
      the gathered keys and values.

    On a CPU attention with context parallelism keeps a mask for its later queries (of the first
    rank); on CUDA each attention keeps 24 bytes of a random state. Equal to what is measured on a
    CPU, and on fake tensors with the operations of CUDA (tests); not run there. A compiled block
    keeps no more.
    """
    c, s, d, cp = options.dtype_bytes, max(4, options.dtype_bytes), model.hidden_size, layout.cp
    (tokens, stream), (q, k, f, h) = _tokens(layout, options), _widths(model, layout)
    if options.activation_checkpoint == "full":
        return c * stream * d
    random_state = 24 * (1 if cp == 1 else 2) if options.cuda else 0
    if options.activation_checkpoint == "selective":
        kept = c * stream * d + 2 * c * tokens * (q + k + f + d) + s * h * tokens + random_state
        if layout.tp > 1:
            kept += c * d * (2 * tokens + (2 * stream if options.sequence_parallel else 0))
        return kept + (c * 2 * k * cp * tokens if cp > 1 else 0)
    norms = 2 * stream * (s + c * d)
    attention = c * tokens * (3 * q + 2 * k * cp) + s * h * tokens + random_state
    if cp > 1 and not options.cuda:
        attention += c * options.seq_len * options.seq_len // (2 * cp)
    return norms + 2 * c * tokens * d + attention + 2 * c * tokens * f


def embedding_bytes(layout: Layout, options: Options) -> int:
    """Bytes that an embedding keeps per micro-batch: row and mask of each token, where it is cut.

    Its result is the input of the first block.
    """
    return 9 * _tokens(layout, options)[0] if layout.tp > 1 else 0


def head_bytes(model: LlamaConfig, layout: Layout, options: Options) -> int:
    """Bytes that the last norm and the head keep per micro-batch, without the loss.

    With a loss in chunks the gradient of the head's input takes its place.
    """
    c, s, d = options.dtype_bytes, max(4, options.dtype_bytes), model.hidden_size
    tokens, stream = _tokens(layout, options)
    return stream * (s + c * d) + c * tokens * d


def loss_bytes(model: LlamaConfig, layout: Layout, options: Options) -> tuple[int, int]:
    """Bytes that the loss keeps for its backward, and its largest, per micro-batch.

    Whole, it keeps the softmax in s, and 10 bytes a token of rows and masks; at its largest the
    backward has made of it the gradient of the logits, in s and in c. In chunks it keeps the
    gradient of the weight in c; at its largest it holds that in s, and of a chunk the logits, the
    softmax and its gradient in s and c, and the gradient of the chunk before; or, where chunks are
    small, what a chunk adds to the gradient of the weight. After either the gradient of the head is
    whole in c and in float32, as it is reduced.
    """
    c, s, d = options.dtype_bytes, max(4, options.dtype_bytes), model.hidden_size
    tokens, rows = _tokens(layout, options)[0], -(-model.vocab_size // layout.tp)
    table, again = rows * d, c if c < s else 0
    if options.loss_chunks == 1:
        kept = (s * rows + 10) * tokens
        return kept, max(kept + (s + again) * rows * tokens, (c + s) * table)
    length = _chunks(options.seq_len // layout.cp, options.loss_chunks)[0] * layout.batch_size
    logits, adding = (2 * c + 2 * s + again) * rows * length, c * (table + 2 * rows * length)
    return c * table, max(s * table + c * d * tokens + max(logits, adding), (c + s) * table)


def working_bytes(model: LlamaConfig, layout: Layout, options: Options, facts: Facts = OURS) -> int:
    """Bytes of a block's backward beside what its forward kept: what is computed again, and the
    gradients of three tensors of the feed-forward and two of the stream at a time."""
    tokens, f = _tokens(layout, options)[0], _widths(model, layout)[2]
    again, kept = 0, facts.block_bytes or block_bytes
    if options.activation_checkpoint != "none":
        whole = kept(model, layout, replace(options, activation_checkpoint="none"))
        again = max(0, whole - kept(model, layout, options))
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
    """Bytes that do not depend on the pipeline or on dp: of a block, of the embedding, of norm and
    head, of what crosses between stages, what the loss keeps, its largest, and a block's backward.
    """

    block: int
    embedding: int
    head: int
    boundary: int
    loss_kept: int
    loss: int
    working: int


def micro_batch_bytes(
    model: LlamaConfig, layout: Layout, options: Options, facts: Facts = OURS
) -> MicroBatch:
    """Of one micro-batch."""
    tokens, stream = _tokens(layout, options)
    kept, largest = loss_bytes(model, layout, options)
    if facts.logit_bytes:
        kept = 4 * tokens * model.vocab_size // layout.tp
        largest = round(facts.logit_bytes * tokens * model.vocab_size / layout.tp)
    return MicroBatch(
        (facts.block_bytes or block_bytes)(model, layout, options),
        embedding_bytes(layout, options),
        head_bytes(model, layout, options),
        options.dtype_bytes * stream * model.hidden_size,
        kept,
        largest,
        working_bytes(model, layout, options, facts),
    )


def memory(
    model: LlamaConfig,
    layout: Layout,
    options: Options,
    stages: Sequence[Stage] = (),
    facts: Facts = OURS,
) -> Memory:
    """What the ranks that hold ``stages`` hold at most; without any, those of the whole model."""
    micro = micro_batch_bytes(model, layout, options, facts)
    return rank_memory(layout, options, holding(model, stages), unit_sizes(model, layout), micro)


def rank_memory(
    layout: Layout,
    options: Options,
    held: Holding,
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
    c, s, zero = options.dtype_bytes, max(4, options.dtype_bytes), layout.zero
    block, embedding, head = units[0], held.first * units[1], held.last * units[2]
    whole = held.blocks * block + embedding + head
    stored = 0 if options.cpu_offload else whole // layout.shards
    alone = layout.shards * layout.replicas == 1
    plain = alone and c == s and not options.cpu_offload  # then there is no FSDP2
    if plain:
        gathered = 0
    elif zero == 3:
        ahead = 1 if options.prefetch is None else options.prefetch
        gathered = min(held.blocks, 1 + ahead) * block + head
    else:
        gathered = whole - (embedding if zero == 2 else 0)
    unsharded = (c + s) * block if zero >= 2 else s * (whole + block)
    if layout.pp > 1 and c < s and SCHEDULES[layout.pp_schedule].splits_backward:
        # Of weights, as they are computed: FSDP2 adds them to those in s at its next backward.
        unsharded = max(unsharded, (c + s) * whole)
    flights, buffers = (1,), 0
    if layout.pp > 1:
        schedule, m = layout.pp_schedule, layout.micro_batches
        # What was received is then the first input of a stage, and what goes on stays.
        flights = in_flight(schedule, layout.pp, held.pp_rank, m)
        buffers = receiving(schedule, layout.pp)
    ends = micro.head, micro.boundary
    return Memory(
        parameters=s * stored,
        gradients=s * stored,
        optimizer=2 * options.moment_bytes * stored,
        gathered=c * gathered,
        unsharded_gradients=0 if plain else unsharded,
        activations=sum(
            n * (x[0] * micro.block + x[1] * micro.embedding + ends[not x[2]])
            for n, x in zip(flights, held.stages, strict=True)
        ),
        buffers=micro.boundary * buffers,
        loss=(flights[-1] - 1) * micro.loss_kept + micro.loss if held.last else 0,
        working=micro.working,
    )
