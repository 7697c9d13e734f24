"""How a model is laid out and computed, beside the layout. Torch-free."""

import re
from dataclasses import dataclass

DTYPE_BYTES = {"bfloat16": 2, "float32": 4, "float64": 8}


@dataclass(frozen=True, kw_only=True)
class ParallelOptions:
    """What :func:`parallel.parallelize` and the planner are told.

    Attributes:
        sequence_parallel: shard the residual stream along the sequence over tp.
        dtype: compute dtype by name; parameters are stored in float32, or float64 with float64.
        activation_checkpoint: "none", "full", or "every-N" for one block in N.
        compile: compile each block.
        cpu_offload: shards and gradients are on the CPU.
        loss_chunks: parts of the sequence whose logits exist at a time.
        prefetch: blocks whose parameters are gathered ahead of their use; None leaves it to FSDP2.
        grad_compression: "none", "bf16", "fp16" or "powersgd".
    """

    sequence_parallel: bool = False
    dtype: str = "bfloat16"
    activation_checkpoint: str = "none"
    compile: bool = False
    cpu_offload: bool = False
    loss_chunks: int = 1
    prefetch: int | None = None
    grad_compression: str = "none"

    @property
    def dtype_bytes(self) -> int:
        """Bytes of a number in the compute dtype."""
        return DTYPE_BYTES[self.dtype]


def checkpoint_every(mode: str) -> int:
    """The N of ``--activation-checkpoint every-N``, of whose blocks one in N keeps its input alone:
    1 for "full", 0 for "none".

    Raises:
        ValueError: if it is none of these.
    """
    if mode in ("none", "full"):
        return int(mode == "full")
    number = re.fullmatch(r"every-([1-9]\d{0,3})", mode)
    if not number:
        raise ValueError(f"must be none, full or every-N, as every-2, not {mode!r}")
    return int(number[1])


def checkpointed(blocks: range, mode: str) -> int:
    """How many of the blocks of these numbers keep their input alone."""
    every = checkpoint_every(mode)
    return (blocks.stop - 1) // every - (blocks.start - 1) // every if every else 0
