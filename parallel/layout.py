"""Sizes and names of the mesh dims, and every rule about which layout is possible. Torch-free."""

import math
import os
import re
from dataclasses import dataclass

from models.config import LlamaConfig


class LayoutError(ValueError):
    """A layout that cannot be built, in one line with the flag, both numbers and the fix."""


@dataclass(frozen=True)
class Launch:
    """This process among all processes of the job, as the launcher describes it."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int


def read_launch(environ=os.environ) -> Launch:
    """Read the launcher's variables: torchrun's, else those of an ``srun`` step, else one process.

    Raises:
        LayoutError: if torchrun's variables are incomplete or contradict each other.
    """
    if "WORLD_SIZE" in environ or "RANK" in environ:
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        defaults = {
            "LOCAL_RANK": environ.get("RANK"),
            "LOCAL_WORLD_SIZE": environ.get("WORLD_SIZE"),
        }
    elif environ.get("SLURM_STEP_NUM_TASKS", "1") != "1":
        names = (
            "SLURM_PROCID",
            "SLURM_STEP_NUM_TASKS",
            "SLURM_LOCALID",
            "SLURM_STEP_TASKS_PER_NODE",
        )
        defaults = {}
    else:
        return Launch(0, 1, 0, 1)
    try:
        # SLURM writes tasks per node as "4(x2)" or "4,3"; a number is enough for a warning.
        values = [environ.get(n, defaults.get(n)).split("(")[0].split(",")[0] for n in names]
        launch = Launch(*map(int, values))
    except (AttributeError, ValueError):
        found = ", ".join(f"{n}={environ.get(n)}" for n in names)
        raise LayoutError(
            f"launcher variables are incomplete ({found}): start with torchrun or srun"
        ) from None
    if not 0 <= launch.rank < launch.world_size:
        raise LayoutError(f"{names[0]}={launch.rank} is outside {names[1]}={launch.world_size}")
    # SLURM's tasks per node differ between nodes, and only the first node's are known here.
    if names[0] == "RANK":
        local, local_world = launch.local_rank, launch.local_world_size
        if not 0 <= local < local_world <= launch.world_size:
            raise LayoutError(
                f"LOCAL_RANK={local}, LOCAL_WORLD_SIZE={local_world} and "
                f"WORLD_SIZE={launch.world_size} contradict each other: start with torchrun or srun"
            )
        absent = [n for n in ("MASTER_ADDR", "MASTER_PORT") if not environ.get(n)]
        if launch.world_size > 1 and absent:
            raise LayoutError(f"{' and '.join(absent)} not set: start with torchrun or srun")
    return launch


@dataclass(frozen=True)
class Layout:
    """How the ranks are arranged, and how the global batch is cut for them.

    Attributes:
        dp: data-parallel ranks among which FSDP2 shards.
        tp: tensor-parallel ranks, innermost in the mesh.
        batch_size: sequences per data-parallel rank per micro-batch.
        micro_batches: micro-batches per optimizer step and data-parallel rank.
        dp_replicate: groups of dp ranks that hold the same shards, outermost in the mesh.
        cp: ranks among which every sequence is cut.
        zero: what the dp ranks share out (see ``--zero``).
    """

    dp: int
    tp: int
    batch_size: int
    micro_batches: int
    dp_replicate: int = 1
    cp: int = 1
    zero: int = 3

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return self.data_ranks * self.cp * self.tp

    @property
    def data_ranks(self) -> int:
        """Number of parts into which the global batch is cut."""
        return self.dp_replicate * self.dp

    @property
    def mesh_dims(self) -> dict[str, int]:
        """Names and sizes of the mesh, outermost first; only dp and tp exist with a size of 1."""
        # ZeRO-0 shares out nothing: every dp rank is a replica.
        replicate, shard = (self.dp, 1) if self.zero == 0 else (self.dp_replicate, self.dp)
        dims = {"dp_replicate": replicate, "dp": shard, "cp": self.cp, "tp": self.tp}
        return {name: size for name, size in dims.items() if size > 1 or name in ("dp", "tp")}

    @property
    def shards(self) -> int:
        """Ranks among which FSDP2 shards: those of dp and cp."""
        return self.mesh_dims["dp"] * self.cp

    @property
    def name(self) -> str:
        """The layout as ``dp x tp``, for example ``2x4``; with more dims ``rep2-dp2-cp2-tp1``."""
        if self.dp_replicate == self.cp == 1:
            return f"{self.dp}x{self.tp}"
        replicas = f"rep{self.dp_replicate}-" if self.dp_replicate > 1 else ""
        context = f"cp{self.cp}-" if self.cp > 1 else ""
        return f"{replicas}dp{self.dp}-{context}tp{self.tp}"


def parse_layout(name: str) -> dict[str, int]:
    """The sizes in a layout name, as :attr:`Layout.name` writes it: 2x4, or rep2-dp2-cp2-tp1.

    Returns:
        "dp_replicate", "dp", "cp" and "tp".

    Raises:
        LayoutError: if it is none.
    """
    size = r"([1-9]\d{0,6})"
    short = re.fullmatch(f"{size}x{size}", name)
    long = re.fullmatch(f"(?:rep{size}-)?dp{size}-(?:cp{size}-)?tp{size}", name)
    if not short and not long:
        raise LayoutError(
            f"layout {name!r} is not dp x tp: write two sizes, as in 2x4, or rep2-dp2-cp2-tp1"
        )
    replicate, dp, cp, tp = long.groups() if long else (None, short[1], None, short[2])
    return {
        "dp_replicate": int(replicate or 1), "dp": int(dp), "cp": int(cp or 1), "tp": int(tp)
    }  # fmt: skip


def _divisors(n: int) -> str:
    found = [str(d) for d in range(1, n + 1) if n % d == 0]
    return ", ".join(found[:-1]) + (" or " if len(found) > 1 else "") + found[-1]


def make_layout(
    *,
    world_size: int,
    tp: int,
    global_batch_size: int,
    batch_size: int | None = None,
    dp_replicate: int = 1,
    cp: int = 1,
    zero: int = 3,
) -> Layout:
    """Arrange ``world_size`` ranks and cut the global batch.

    ``batch_size`` is in sequences per data-parallel rank per micro-batch; None takes its whole
    share in one micro-batch.

    Raises:
        LayoutError: if the sizes do not divide.
    """
    if world_size % tp:
        raise LayoutError(
            f"--tp {tp} does not divide the {world_size} processes: "
            f"use --tp {_divisors(world_size)}, or start a multiple of {tp} processes"
        )
    if world_size // tp % cp:
        raise LayoutError(
            f"--cp {cp} does not divide the {world_size // tp} ranks that {world_size} processes "
            f"leave with --tp {tp}: use --cp {_divisors(world_size // tp)}"
        )
    ranks = world_size // tp // cp
    if ranks % dp_replicate:
        raise LayoutError(
            f"--dp-replicate {dp_replicate} does not divide the {ranks} data-parallel ranks "
            f"({world_size} processes / --cp {cp} / --tp {tp}): "
            f"use --dp-replicate {_divisors(ranks)}"
        )
    if zero == 0 and dp_replicate > 1:
        raise LayoutError(
            f"--dp-replicate {dp_replicate} has no meaning with --zero 0, where all {ranks} "
            "data-parallel ranks are replicas: leave it out"
        )
    if global_batch_size % ranks:
        raise LayoutError(
            f"--global-batch-size {global_batch_size} is not a multiple of the {ranks} "
            f"data-parallel ranks: use {-(-global_batch_size // ranks) * ranks}, or another --tp"
        )
    share = global_batch_size // ranks
    batch_size = batch_size or share
    if share % batch_size:
        raise LayoutError(
            f"--batch-size {batch_size} does not divide the {share} sequences of a "
            f"data-parallel rank (--global-batch-size {global_batch_size} / dp {ranks}): "
            f"use --batch-size {_divisors(share)}"
        )
    return Layout(
        dp=ranks // dp_replicate,
        tp=tp,
        batch_size=batch_size,
        micro_batches=share // batch_size,
        dp_replicate=dp_replicate,
        cp=cp,
        zero=zero,
    )


def check_tensor_parallel(
    model: LlamaConfig, layout: Layout, seq_len: int, sequence_parallel: bool
) -> None:
    """Check that the model can be cut over the tp ranks. ``vocab_size`` may still be None.

    Raises:
        LayoutError: naming the first field that does not fit.
    """
    tp, heads, kv_heads = layout.tp, model.num_attention_heads, model.kv_heads
    if heads % tp:
        raise LayoutError(
            f"--tp {tp} does not divide --num-attention-heads {heads}: use --tp {_divisors(heads)}"
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
    # What tp cuts unevenly by rows, dp cuts by columns.
    dp = layout.shards
    if model.hidden_size % dp:
        raise LayoutError(
            f"--vocab-size {vocab} is not a multiple of --tp {tp}, and --hidden-size "
            f"{model.hidden_size} not one of dp {dp}: "
            f"use --vocab-size {-(-vocab // tp) * tp}"
        )
