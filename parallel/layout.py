"""Sizes and names of the mesh dims, and every rule about which layout is possible. Torch-free."""

import math
import os
import re
from dataclasses import dataclass

from models.config import LlamaConfig
from models.files import printable
from parallel.stages import SCHEDULES, Stage, make_stages, micro_batches_needed


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
    if launch.world_size > 1:
        # Under srun a port that is not set is derived from the other two.
        own = names[0] == "RANK"
        for name in ("MASTER_PORT",) if own else ("MASTER_PORT", "SLURM_JOB_ID", "SLURM_STEP_ID"):
            _check_number(environ, name, (1, 65535) if name == "MASTER_PORT" else (0, 2**32))
    return launch


def _check_number(environ, name: str, limits: tuple[int, int]) -> None:
    text, (low, high) = environ.get(name), limits
    if text is None or (re.fullmatch("[0-9]{1,10}", text) and low <= int(text) <= high):
        return
    raise LayoutError(
        f"{name}={printable(text)} is no number from {low} to {high}: "
        "start with torchrun or srun, which set it"
    )


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
        pp: pipeline-parallel ranks, outermost in the mesh.
        pp_schedule: a key of :data:`parallel.stages.SCHEDULES`.
    """

    dp: int
    tp: int
    batch_size: int
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
        """Number of parts into which the global batch is cut."""
        return self.dp_replicate * self.dp

    @property
    def mesh_dims(self) -> dict[str, int]:
        """Names and sizes of the mesh, outermost first; only dp and tp exist with a size of 1."""
        shard = self.shards // self.cp
        dims = {
            "pp": self.pp, "dp_replicate": self.replicas, "dp": shard, "cp": self.cp, "tp": self.tp
        }  # fmt: skip
        return {name: size for name, size in dims.items() if size > 1 or name in ("dp", "tp")}

    @property
    def shards(self) -> int:
        """Ranks among which FSDP2 shards: those of dp and cp."""
        return (1 if self.zero == 0 else self.dp) * self.cp

    @property
    def replicas(self) -> int:
        """Ranks that hold the same shard: with ZeRO-0, which shares out nothing, all of dp."""
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
    if not short and not long:
        raise LayoutError(
            f"layout {name!r} is not dp x tp: write two sizes, as in 2x4, or pp2-rep2-dp2-cp2-tp1"
        )
    found = long.groups() if long else (None, None, short[1], None, short[2])
    names = ("pp", "dp_replicate", "dp", "cp", "tp")
    return {name: int(size or 1) for name, size in zip(names, found, strict=True)}


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


def _divisors(n: int) -> str:
    found = list(map(str, divisors(n)))
    return ", ".join(found[:-1]) + (" or " if len(found) > 1 else "") + found[-1]


def _fill_pipeline(
    share: int, batch_size: int | None, pp: int, schedule: str, global_batch_size: int
) -> int:
    """The micro-batch of a pipeline, in sequences: by default the largest that leaves at least
    2 pp micro-batches, or else the smallest.

    Raises:
        LayoutError: if the schedule needs other micro-batches than the ``share`` of a rank gives.
    """
    needed = micro_batches_needed(schedule, pp, share // (batch_size or 1))
    if batch_size and not needed:
        return batch_size
    fits = [b for b in divisors(share) if not micro_batches_needed(schedule, pp, share // b)]
    if batch_size is None and fits:
        full = [b for b in fits if share // b >= 2 * pp]
        return max(full) if full else min(fits)
    of = f"--pp {pp} with --pp-schedule {schedule} needs {needed}"
    if fits:
        raise LayoutError(
            f"{of}, and --batch-size {batch_size} leaves {share // batch_size} of the {share} "
            f"sequences of a data-parallel rank: use --batch-size {max(fits)}"
        )
    ranks, unit, least = global_batch_size // share, batch_size or 1, share
    while least % unit or micro_batches_needed(schedule, pp, least // unit):
        least += 1
    raise LayoutError(
        f"{of}, and a data-parallel rank has {share} sequences (--global-batch-size "
        f"{global_batch_size} / dp {ranks}): use --global-batch-size {ranks * least}, "
        "or a smaller --pp"
    )


def make_layout(
    *,
    world_size: int,
    tp: int,
    global_batch_size: int,
    batch_size: int | None = None,
    dp_replicate: int = 1,
    cp: int = 1,
    zero: int = 3,
    pp: int = 1,
    pp_schedule: str = "1f1b",
) -> Layout:
    """Arrange ``world_size`` ranks and cut the global batch.

    ``batch_size`` is in sequences per data-parallel rank per micro-batch; None takes its whole
    share in one micro-batch, or fills the pipeline.

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
    if world_size // tp // cp % pp:
        left = world_size // tp // cp
        raise LayoutError(
            f"--pp {pp} does not divide the {left} ranks that {world_size} processes leave with "
            f"--cp {cp} and --tp {tp}: use --pp {_divisors(left)}"
        )
    ranks = world_size // tp // cp // pp
    if ranks % dp_replicate:
        raise LayoutError(
            f"--dp-replicate {dp_replicate} does not divide the {ranks} data-parallel ranks "
            f"({world_size} processes / --pp {pp} / --cp {cp} / --tp {tp}): "
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
    if share % (batch_size or 1):
        raise LayoutError(
            f"--batch-size {batch_size} does not divide the {share} sequences of a "
            f"data-parallel rank (--global-batch-size {global_batch_size} / dp {ranks}): "
            f"use --batch-size {_divisors(share)}"
        )
    if pp > 1:
        batch_size = _fill_pipeline(share, batch_size, pp, pp_schedule, global_batch_size)
    batch_size = batch_size or share
    return Layout(
        dp=ranks // dp_replicate,
        tp=tp,
        batch_size=batch_size,
        micro_batches=share // batch_size,
        dp_replicate=dp_replicate,
        cp=cp,
        zero=zero,
        pp=pp,
        pp_schedule=pp_schedule,
    )


def check_pipeline(
    model: LlamaConfig, layout: Layout, activation_checkpoint: str, compile: bool
) -> None:
    """Check that the model can be cut into stages, and that the schedule can run them.

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


# PowerSGD (Vogels et al. 2019) sends a matrix as two factors of this rank. torch's documentation
# names 1 to 4 as usual, and 32 for language, after the paper's appendix D.
POWERSGD_RANK = 32
# Steps whose gradients are whole before it begins; torch takes no fewer.
POWERSGD_START = 2


def powersgd_compresses(shape: tuple[int, ...]) -> bool:
    """Whether the gradient of a parameter is sent as factors: where these have under half of it."""
    return len(shape) == 2 and 2 * POWERSGD_RANK * sum(shape) < math.prod(shape)


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
