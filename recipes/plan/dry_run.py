"""The planner's formulas beside the trainer itself, as one rank of any world on one process.

    python -m recipes.plan --dry-run --layout pp8-dp8-tp8 --recipe llama3_405b

Every number here is linear in the blocks and in the micro-batches of a rank, so that a few of each
say exactly what all of them do. Torch-free until it traces (``recipes/plan/trace.py``).
"""

from dataclasses import replace

from common.errors import LayoutError
from common.text import columns
from parallel.layout import Layout
from parallel.stages import SCHEDULES, Stage, micro_batches_needed
from planner.collectives import collectives
from planner.memory import (
    MicroBatch,
    holding,
    memory,
    micro_batch_bytes,
    stage_bytes,
    stage_parameters,
)
from training.config.options import planner_options
from training.config.schema import Config

Numbers = dict[str, int]
# Of gradients that are held until the end of a step; the fewest micro-batches may not reach it.
WHOLE = "whole gradients"


def on_cuda(config: Config) -> bool:
    """Whether CUDA's norm and attention are traced: in bfloat16, which is for GPUs."""
    return config.step.dtype == "bfloat16"


def formula(config: Config, layout: Layout, pp_rank: int) -> Numbers:
    """What the ranks at a coordinate of pp hold and send, as the planner has it."""
    model, options = config.model, planner_options(config, on_cuda(config))
    stages = layout.rank_stages(model, config.step.seq_len, pp_rank)
    all_of, micro = (
        memory(model, layout, options, stages),
        micro_batch_bytes(model, layout, options),
    )
    sizes = {
        "parameters": all_of.parameters,
        "gradients": all_of.gradients,
        "optimizer state": all_of.optimizer,
        "kept by a micro-batch": _kept(config, micro, stages),
    }
    if layout.zero <= 1:
        sizes["gathered parameters"] = all_of.gathered
        splits = SCHEDULES[layout.pp_schedule].splits_backward
        if layout.micro_batches > 1 and all_of.unsharded_gradients and not splits:
            # Before they are sharded, and padded.
            whole = stage_parameters(model, replace(layout, dp=1, cp=1), stages)
            sizes[WHOLE] = options.wide_bytes * whole
    sent = collectives(model, layout, options, config.step.seq_len, stages)
    # Where a sequence is sharded over all ranks, they are one group, also as shards.
    names = {"dp x cp": "cp"} if layout.cp == layout.world_size else {}
    rows = [(names.get(c.dim, c.dim), c.kind, c.bytes, c.count * c.units) for c in sent]
    # Loss and squared gradient norm, in float64.
    return _numbers(sizes, [*rows, ("all", "all_reduce", 16, 1)])


def _numbers(sizes: Numbers, sent: list[tuple[str, str, int, int]]) -> Numbers:
    """Bytes that are held, and count and bytes of the collectives by mesh dim and kind.

    Args:
        sent: mesh dim, kind, bytes of the whole tensor, and number of each collective.
    """
    numbers = {f"{what}: bytes": size for what, size in sizes.items()}
    for dim, kind, size, number in sorted(sent):
        for unit, value in (("count", number), ("bytes", number * size)):
            name = f"{kind} over {dim}: {unit}"
            numbers[name] = numbers.get(name, 0) + value
    return numbers


def _kept(config: Config, micro: MicroBatch, stages: list[Stage]) -> int:
    """Bytes that a micro-batch leaves for its backward in the stages of a rank."""
    here = holding(config.model, stages, config.memory.activation_checkpoint)
    loss = micro.loss_kept if here.last else 0
    return loss + sum(stage_bytes(stage, micro) for stage in here.stages)


def _line(points: dict[int, int], at: int) -> int:
    """The value at ``at`` of the line through two points, or of the constant of one."""
    (x, y), *rest = points.items()
    if not rest:
        return y
    ((x1, y1),) = rest
    return y + (y1 - y) * (at - x) // (x1 - x)


def _samples(config: Config, layout: Layout, pp_rank: int) -> tuple[list[int], list[int]]:
    """Blocks a stage, and micro-batches, that are traced for all of them."""
    stages = layout.rank_stages(config.model, config.step.seq_len, pp_rank)
    most = max((len(stage.blocks) for stage in stages), default=config.model.num_hidden_layers)
    counts = [
        m
        for m in range(1, layout.micro_batches + 1)
        if layout.pp == 1 or not micro_batches_needed(layout.pp_schedule, layout.pp, m)
    ]
    return [1, 2][:most], counts[:2]


def extrapolate(config: Config, layout: Layout, pp_rank: int) -> Numbers:
    """What :func:`formula` gives, from traces of at most two blocks a stage and of the two smallest
    numbers of micro-batches that the schedule runs."""
    from recipes.plan.trace import trace

    stages = layout.rank_stages(config.model, config.step.seq_len, pp_rank)
    blocks = sum(len(stage.blocks) for stage in stages) or config.model.num_hidden_layers
    sizes, counts = _samples(config, layout, pp_rank)
    lines = {}
    for m in counts:
        by_size = {}
        for size in sizes:
            sampled = replace(layout, micro_batches=m)
            traced = trace(config, sampled, pp_rank, size, cuda=on_cuda(config))
            sent = [(*key, number) for key, number in traced.sent.items()]
            by_size[size * max(1, len(stages))] = _numbers(traced.held, sent)
        for name in next(iter(by_size.values())):
            points = {size: numbers[name] for size, numbers in by_size.items()}
            lines.setdefault(name, {})[m] = _line(points, blocks)
    whole = lines.pop(f"{WHOLE}: bytes", {})
    largest = {f"{WHOLE}: bytes": max(whole.values())} if whole else {}
    return largest | {name: _line(points, layout.micro_batches) for name, points in lines.items()}


def dry_run(config: Config, layout: Layout) -> int:
    """Print what the trainer does on the first, a middle and the last coordinate of a pipeline
    beside the formulas; without a pipeline, on rank 0.

    Args:
        config: checked; its vocabulary is set.

    Returns:
        1 if a number differs, else 0.

    Raises:
        LayoutError: for what cannot be traced.
    """
    _refuse(config)
    where = "with the operations of CUDA" if on_cuda(config) else "with the operations of a CPU"
    print(f"layout {layout.name}, {layout.world_size} ranks, traced {where}; nothing has run there")
    different = 0
    for pp_rank in sorted({0, layout.pp // 2, layout.pp - 1}):
        sizes, counts = _samples(config, layout, pp_rank)
        traced, expected = extrapolate(config, layout, pp_rank), formula(config, layout, pp_rank)
        table = [("what", "traced", "formula", "")]
        for name in {**expected, **traced}:
            pair = traced.get(name, 0), expected.get(name, 0)
            same = pair[0] == pair[1]
            different += not same
            table.append((name, *(f"{n:,}" for n in pair), "equal" if same else "DIFFERENT"))
        stages = layout.rank_stages(config.model, config.step.seq_len, pp_rank)
        print(f"\n{_title(config, layout, pp_rank, stages)}")
        print(f"from {_or(sizes)} blocks and {_or(counts)} micro-batches, for all of them:\n")
        print("\n".join(columns(table)))
    print(f"\n{different} numbers differ" if different else "\nall numbers are equal")
    return int(different > 0)


def _or(numbers: list[int]) -> str:
    return " or ".join(map(str, numbers))


def _title(config: Config, layout: Layout, pp_rank: int, stages: list[Stage]) -> str:
    rank = pp_rank * layout.world_size // layout.pp
    held_blocks = [stage.blocks for stage in stages] or [range(config.model.num_hidden_layers)]
    blocks = " and ".join(f"{b.start} to {b.stop - 1}" for b in held_blocks)
    return f"rank {rank}: blocks {blocks}, {layout.micro_batches} micro-batches"


def _refuse(config: Config) -> None:
    chosen = config.memory
    for flag, value, off in (
        ("--compile", chosen.compile, "--no-compile"),
        ("--cpu-offload", chosen.cpu_offload, "--no-cpu-offload"),
        (
            f"--activation-checkpoint {chosen.activation_checkpoint}",
            chosen.activation_checkpoint not in ("none", "full"),
            "--activation-checkpoint none or full",
        ),
        (
            f"--grad-compression {chosen.grad_compression}",
            chosen.grad_compression != "none",
            "--grad-compression none",
        ),
    ):
        if value:
            raise LayoutError(f"{flag} cannot be traced without the devices: use {off}")
