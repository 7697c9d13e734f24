"""Which layouts a model and its options allow. Torch-free."""

import math

from common.errors import LayoutError
from models.config import LlamaConfig
from parallel.layout import POWERSGD_RANK, Layout, divisors_text, powersgd_compresses
from parallel.stages import SCHEDULES


def check_pipeline(
    model: LlamaConfig, layout: Layout, activation_checkpoint: str, compile: bool
) -> None:
    """Check that the model can be split into stages, and that the schedule can run them.

    Raises:
        LayoutError: naming the first flag that does not fit.
    """
    if layout.pp == 1:
        return
    schedule, name = SCHEDULES[layout.pp_schedule], layout.pp_schedule
    stages = layout.pp * schedule.stages_per_rank
    if model.tie_word_embeddings:
        raise LayoutError(
            f"--pp {layout.pp} puts embedding and head on other ranks, and --tie-word-embeddings "
            "makes them one: use --no-tie-word-embeddings or --pp 1"
        )
    if model.num_hidden_layers < stages:
        raise LayoutError(
            f"--pp {layout.pp} with --pp-schedule {name} has {stages} stages, and "
            f"--num-hidden-layers {model.num_hidden_layers} fills only as many: use a smaller --pp"
            + (" or --pp-schedule 1f1b" if schedule.stages_per_rank > 1 else "")
        )
    if schedule.splits_backward and layout.zero >= 2:
        raise LayoutError(
            f"--pp-schedule {name} has no gradients of weights to reduce until the end of a step, "
            f"and --zero {layout.zero} reduces them every micro-batch: use --zero 1"
        )
    if schedule.splits_backward and activation_checkpoint != "none":
        raise LayoutError(
            f"--pp-schedule {name} runs a backward in two parts, and --activation-checkpoint "
            f"{activation_checkpoint} computes a block again in one: use "
            "--activation-checkpoint none or --pp-schedule 1f1b"
        )
    if schedule.splits_backward and compile:
        raise LayoutError(
            f"--pp-schedule {name} runs a backward in two parts, and --compile makes it one: "
            "use --no-compile or --pp-schedule 1f1b"
        )


def check_grad_compression(
    compression: str,
    model: LlamaConfig,
    layout: Layout,
    *,
    prefetch: int | None,
    cpu_offload: bool,
) -> None:
    """Check that ``--grad-compression`` fits the layout and the model.

    Raises:
        LayoutError: naming the first setting that does not fit.
    """
    if compression == "none":
        return
    chosen = f"--grad-compression {compression}"
    for name, value, needed in (
        ("--pp", layout.pp, 1),
        ("--tp", layout.tp, 1),
        ("--cp", layout.cp, 1),
        ("--dp-replicate", layout.dp_replicate, 1),
        ("--zero", layout.zero, 0),
    ):
        if value != needed:
            raise LayoutError(
                f"{chosen} is for data parallelism alone, without shards, and not for {name} "
                f"{value}: use {name} {needed}, or --grad-compression none"
            )
    if prefetch is not None:
        raise LayoutError(
            f"--prefetch {prefetch} gathers shards, and with {chosen} there are none: leave it out"
        )
    if cpu_offload:
        raise LayoutError(
            f"--cpu-offload keeps shards on the CPU, and with {chosen} there are none: leave it out"
        )
    # An unset vocabulary is not known yet; the blocks decide then.
    shapes = model.model_copy(update={"vocab_size": model.vocab_size or 1}).parameter_shapes
    if compression == "powersgd" and not any(map(powersgd_compresses, shapes.values())):
        raise LayoutError(
            f"{chosen} finds no matrix that two factors of rank {POWERSGD_RANK} would halve with "
            f"--hidden-size {model.hidden_size}: use --grad-compression bf16"
        )


def check_tensor_parallel(
    model: LlamaConfig, layout: Layout, seq_len: int, sequence_parallel: bool
) -> None:
    """Check that the model can be sharded over the tp ranks. ``vocab_size`` may still be None.

    Raises:
        LayoutError: naming the first field that does not fit.
    """
    tp, heads, kv_heads = layout.tp, model.num_attention_heads, model.kv_heads
    if heads % tp:
        raise LayoutError(
            f"--tp {tp} does not divide --num-attention-heads {heads}: "
            f"use --tp {divisors_text(heads)}"
        )
    if kv_heads % tp and tp % kv_heads:
        raise LayoutError(
            f"--tp {tp} fits --num-key-value-heads {kv_heads} neither way: "
            "one must be a multiple of the other"
        )
    if model.intermediate_size % tp:
        raise LayoutError(
            f"--tp {tp} does not divide --intermediate-size {model.intermediate_size}: "
            f"use --intermediate-size {-(-model.intermediate_size // tp) * tp} or another --tp"
        )
    if seq_len % (2 * layout.cp) and layout.cp > 1:
        unit = 2 * layout.cp
        raise LayoutError(
            f"--cp {layout.cp} cuts --seq-len {seq_len} into {unit} chunks, which do not come out "
            f"even: use --seq-len {-(-seq_len // unit) * unit}"
        )
    if sequence_parallel and seq_len // layout.cp % tp:
        unit, part = tp, f"--seq-len {seq_len}"
        if layout.cp > 1:
            unit = math.lcm(2 * layout.cp, layout.cp * tp)
            part = f"the {seq_len // layout.cp} tokens of {part} on a rank of --cp {layout.cp}"
        raise LayoutError(
            f"--tp {tp} does not divide {part}: "
            f"use --seq-len {-(-seq_len // unit) * unit} or --sequence-parallel off"
        )
    vocab = model.vocab_size
    if vocab is None or vocab % tp == 0:
        return
    if -(-vocab // tp) * (tp - 1) >= vocab:
        raise LayoutError(
            f"--vocab-size {vocab} leaves a rank of --tp {tp} without a row: "
            f"use --vocab-size {-(-vocab // tp) * tp} or a smaller --tp"
        )
    # A vocabulary that tp shards unevenly by rows is sharded over dp by columns.
    dp = layout.shards
    if model.hidden_size % dp:
        raise LayoutError(
            f"--vocab-size {vocab} is not a multiple of --tp {tp}, and --hidden-size "
            f"{model.hidden_size} not one of dp {dp}: "
            f"use --vocab-size {-(-vocab // tp) * tp}"
        )
