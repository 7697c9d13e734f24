"""Sizes and names of the mesh dims, and every rule about which layout is possible. Torch-free."""

import math
import re
from dataclasses import dataclass

from common.errors import LayoutError
from models.config import LlamaConfig
from parallel.stages import SCHEDULES, Stage, make_stages, micro_batches_needed


@dataclass(frozen=True)
class Layout:
    """How the ranks are arranged, and how the global batch is split among them.

    Attributes:
        dp: data-parallel ranks among which FSDP2 shards.
        tp: tensor-parallel ranks, innermost in the mesh.
        micro_batch_size: sequences per data-parallel rank per micro-batch.
        micro_batches: micro-batches per optimizer step and data-parallel rank.
        dp_replicate: groups of dp ranks that hold the same shards, outermost in the mesh.
        cp: ranks among which every sequence is sharded.
        zero: what the dp ranks shard (see ``--zero``).
        pp: pipeline-parallel ranks, outermost in the mesh.
        pp_schedule: a key of :data:`parallel.stages.SCHEDULES`.
    """

    dp: int
    tp: int
    micro_batch_size: int
    micro_batches: int
    dp_replicate: int = 1
    cp: int = 1
    zero: int = 3
    pp: int = 1
    pp_schedule: str = "1f1b"

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return self.pp * self.data_ranks * self.cp * self.tp

    @property
    def data_ranks(self) -> int:
        """Number of ranks with a part of the global batch of their own."""
        return self.dp_replicate * self.dp

    @property
    def mesh_dims(self) -> dict[str, int]:
        """Names and sizes of the mesh, outermost first; only dp and tp exist with a size of 1."""
        dims = {"pp": self.pp, "dp_replicate": self.replicas, "dp": self.shards // self.cp}
        dims |= {"cp": self.cp, "tp": self.tp}
        return {name: size for name, size in dims.items() if size > 1 or name in ("dp", "tp")}

    @property
    def shards(self) -> int:
        """Ranks among which FSDP2 shards: those of dp and cp."""
        return (1 if self.zero == 0 else self.dp) * self.cp

    @property
    def replicas(self) -> int:
        """Ranks that hold the same shard: with ZeRO-0, which shards nothing, all of dp."""
        return self.dp if self.zero == 0 else self.dp_replicate

    @property
    def name(self) -> str:
        """The layout as ``dp x tp``, for example ``2x4``; with more dims ``pp2-dp2-cp2-tp1``."""
        if self.pp == self.dp_replicate == self.cp == 1:
            return f"{self.dp}x{self.tp}"
        stages = f"pp{self.pp}-" if self.pp > 1 else ""
        replicas = f"rep{self.dp_replicate}-" if self.dp_replicate > 1 else ""
        context = f"cp{self.cp}-" if self.cp > 1 else ""
        return f"{stages}{replicas}dp{self.dp}-{context}tp{self.tp}"

    def stages(self, model: LlamaConfig, seq_len: int) -> list[Stage]:
        """All pipeline stages in order; none without a pipeline."""
        return make_stages(model, self.pp_schedule, self.pp, seq_len) if self.pp > 1 else []

    def rank_stages(self, model: LlamaConfig, seq_len: int, pp_rank: int) -> list[Stage]:
        """The stages of the ranks at a coordinate of pp, in order; none without a pipeline."""
        return [stage for stage in self.stages(model, seq_len) if stage.pp_rank == pp_rank]

    @property
    def data_pp_ranks(self) -> tuple[int, ...]:
        """Coordinates in pp of the ranks that read data: of the first stage, then the last."""
        v_shaped = SCHEDULES[self.pp_schedule].v_shaped
        return (0,) if self.pp == 1 or v_shaped else (0, self.pp - 1)


def parse_layout(name: str) -> dict[str, int]:
    """The sizes in a layout name, as :attr:`Layout.name` writes it: 2x4, or pp2-dp2-cp2-tp1.

    Returns:
        "pp", "dp_replicate", "dp", "cp" and "tp".

    Raises:
        LayoutError: if it is none.
    """
    size = r"([1-9]\d{0,6})"
    short = re.fullmatch(f"{size}x{size}", name)
    long = re.fullmatch(f"(?:pp{size}-)?(?:rep{size}-)?dp{size}-(?:cp{size}-)?tp{size}", name)
    sizes: tuple[str | None, ...]
    if long:
        sizes = long.groups()
    elif short:
        sizes = (None, None, short[1], None, short[2])
    else:
        raise LayoutError(
            f"layout {name!r} is not dp x tp: write two sizes, as in 2x4, or pp2-rep2-dp2-cp2-tp1"
        )
    names = ("pp", "dp_replicate", "dp", "cp", "tp")
    return {name: int(size or 1) for name, size in zip(names, sizes, strict=True)}


def layout_flags(name: str) -> list[str]:
    """The flags of train_llm.py that make the layout of a name; dp is what is left.

    Raises:
        LayoutError: if it is none.
    """
    sizes = parse_layout(name)
    flags = [(f"--{key.replace('_', '-')}", str(size)) for key, size in sizes.items()]
    return [word for pair in flags if pair[0] != "--dp" for word in pair]


def divisors(n: int) -> list[int]:
    """All of them, ascending."""
    small = [i for i in range(1, math.isqrt(n) + 1) if n % i == 0]
    return small + [n // i for i in reversed(small) if i * i != n]


def use_sequence_parallel(setting: str, *, tp: int, local_len: int, cuda: bool) -> bool:
    """Whether ``--sequence-parallel`` is on: with auto on CUDA, where tp divides the tokens that a
    rank has of a sequence."""
    return tp > 1 and (setting == "on" or (setting == "auto" and cuda and local_len % tp == 0))


def divisors_text(n: int) -> str:
    """The divisors of ``n`` for a message: "1, 2 or 4"."""
    numbers = list(map(str, divisors(n)))
    return ", ".join(numbers[:-1]) + (" or " if len(numbers) > 1 else "") + numbers[-1]


def _fill_pipeline(
    share: int, micro_batch_size: int | None, pp: int, schedule: str, global_batch_size: int
) -> int:
    """The micro-batch of a pipeline, in sequences: by default the largest that leaves at least
    2 pp micro-batches, or else the smallest.

    Raises:
        LayoutError: if the schedule needs other micro-batches than the ``share`` of a rank gives.
    """
    needed = micro_batches_needed(schedule, pp, share // (micro_batch_size or 1))
    if micro_batch_size and not needed:
        return micro_batch_size
    fits = [b for b in divisors(share) if not micro_batches_needed(schedule, pp, share // b)]
    of = f"--pp {pp} with --pp-schedule {schedule} needs {needed}"
    if fits:
        if micro_batch_size is None:
            full = [b for b in fits if share // b >= 2 * pp]
            return max(full) if full else min(fits)
        raise LayoutError(
            f"{of}, and --micro-batch-size {micro_batch_size} leaves {share // micro_batch_size} "
            f"of the {share} sequences of a data-parallel rank: use --micro-batch-size {max(fits)}"
        )
    ranks, unit, least = global_batch_size // share, micro_batch_size or 1, share
    while least % unit or micro_batches_needed(schedule, pp, least // unit):
        least += 1
    raise LayoutError(
        f"{of}, and a data-parallel rank has {share} sequences (--global-batch-size "
        f"{global_batch_size} / dp {ranks}): use --global-batch-size {ranks * least}, "
        "or a smaller --pp"
    )


@dataclass(frozen=True, kw_only=True)
class Dims:
    """Sizes of the mesh dims that are asked for; dp is what is left."""

    pp: int = 1
    dp_replicate: int = 1
    cp: int = 1
    tp: int = 1


def _data_ranks(world_size: int, dims: Dims) -> int:
    """The data-parallel ranks that the other dims leave.

    Raises:
        LayoutError: if one does not divide.
    """
    pp, cp, tp = dims.pp, dims.cp, dims.tp
    if world_size % tp:
        raise LayoutError(
            f"--tp {tp} does not divide the {world_size} processes: "
            f"use --tp {divisors_text(world_size)}, or start a multiple of {tp} processes"
        )
    if world_size // tp % cp:
        raise LayoutError(
            f"--cp {cp} does not divide the {world_size // tp} ranks that {world_size} processes "
            f"leave with --tp {tp}: use --cp {divisors_text(world_size // tp)}"
        )
    if (rest := world_size // tp // cp) % pp:
        raise LayoutError(
            f"--pp {pp} does not divide the {rest} ranks that {world_size} processes leave with "
            f"--cp {cp} and --tp {tp}: use --pp {divisors_text(rest)}"
        )
    ranks = rest // pp
    if ranks % dims.dp_replicate:
        raise LayoutError(
            f"--dp-replicate {dims.dp_replicate} does not divide the {ranks} data-parallel ranks "
            f"({world_size} processes / --pp {pp} / --cp {cp} / --tp {tp}): "
            f"use --dp-replicate {divisors_text(ranks)}"
        )
    return ranks


def make_layout(
    world_size: int,
    dims: Dims,
    *,
    global_batch_size: int,
    micro_batch_size: int | None = None,
    zero: int = 3,
    pp_schedule: str = "1f1b",
) -> Layout:
    """Arrange ``world_size`` ranks and split the global batch.

    ``micro_batch_size`` is in sequences of a data-parallel rank; None takes its whole share in one
    micro-batch, or fills the pipeline.

    Raises:
        LayoutError: if the sizes do not divide.
    """
    ranks = _data_ranks(world_size, dims)
    if zero == 0 and dims.dp_replicate > 1:
        raise LayoutError(
            f"--dp-replicate {dims.dp_replicate} has no meaning with --zero 0, where all {ranks} "
            "data-parallel ranks are replicas: leave it out"
        )
    if global_batch_size % ranks:
        raise LayoutError(
            f"--global-batch-size {global_batch_size} is not a multiple of the {ranks} "
            f"data-parallel ranks: use {-(-global_batch_size // ranks) * ranks}, or another --tp"
        )
    share = global_batch_size // ranks
    if share % (micro_batch_size or 1):
        raise LayoutError(
            f"--micro-batch-size {micro_batch_size} does not divide the {share} sequences of a "
            f"data-parallel rank (--global-batch-size {global_batch_size} / dp {ranks}): "
            f"use --micro-batch-size {divisors_text(share)}"
        )
    if dims.pp > 1:
        micro_batch_size = _fill_pipeline(
            share, micro_batch_size, dims.pp, pp_schedule, global_batch_size
        )
    micro_batch_size = micro_batch_size or share
    return Layout(
        dp=ranks // dims.dp_replicate,
        tp=dims.tp,
        micro_batch_size=micro_batch_size,
        micro_batches=share // micro_batch_size,
        dp_replicate=dims.dp_replicate,
        cp=dims.cp,
        zero=zero,
        pp=dims.pp,
        pp_schedule=pp_schedule,
    )


# PowerSGD (Vogels et al. 2019) sends a matrix as two factors of this rank. torch's documentation
# names 1 to 4 as usual, and 32 for language, after the paper's appendix D.
POWERSGD_RANK = 32
# Steps whose gradients are whole before it begins; torch takes no fewer.
POWERSGD_START = 2


def powersgd_compresses(shape: tuple[int, ...]) -> bool:
    """Whether the gradient of a parameter is sent as factors: where these have under half of it."""
    return len(shape) == 2 and 2 * POWERSGD_RANK * sum(shape) < math.prod(shape)
