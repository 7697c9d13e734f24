"""Every layout of some GPUs, what it holds and takes, and what to change so that one fits."""

import collections
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from common.errors import LayoutError
from common.text import GIB
from models.config import LlamaConfig
from parallel.layout import Dims, Layout, divisors, make_layout, use_sequence_parallel
from parallel.rules import check_pipeline, check_tensor_parallel
from parallel.stages import SCHEDULES, Stage
from planner.machine import Machine, ranks_on_a_node
from planner.memory import (
    ITEMS,
    Holding,
    Memory,
    Options,
    holding,
    micro_batch_bytes,
    rank_memory,
    unit_sizes,
)
from planner.time import Time, step_time

# Reserved over allocated memory of CUDA's caching allocator with expandable segments, which
# train_llm.py asks for, and what the context and the communicators of a process take outside it:
# rules of thumb, not measured here.
FRAGMENTATION, CONTEXT_GIB = 1.03, 1.0
# Of the usable memory, what a plan may take; out_of_memory gives it one chance in four.
LIMIT = 0.85
TOO_MUCH = "too much memory"
# Two layouts on one machine share most of a formula's error; what is left has a median of about
# this part (docs/planning.md). Nearer ones are a tie.
TIE = 0.05
# From the fastest to the smallest.
CHECKPOINTING, LOSS_CHUNKS = ("none", "full"), (1, 8)
# Tried where nothing is to be kept. GPipe and DualPipeV wait as long as 1F1B and ZBV, and hold
# more.
ZEROS, SCHEDULES_TRIED, BATCH_SIZES = (3, 2, 1, 0), ("1f1b", "interleaved", "zbv"), (1, 2, 4, 8, 16)
DIMS = ("pp", "dp_replicate", "cp", "tp")

T = TypeVar("T")


@dataclass(frozen=True)
class Plan:
    """A layout with its options, and the formulas' answers.

    Attributes:
        memory: of the ranks of ``pp_rank``, which hold most.
        time: None where it was not asked for.
    """

    layout: Layout
    options: Options
    memory: Memory
    pp_rank: int
    time: Time | None = None

    @property
    def gib(self) -> float:
        """What the process takes of its device, in GiB."""
        tensors = self.memory.total / GIB
        return tensors * FRAGMENTATION + CONTEXT_GIB if self.options.cuda else tensors

    @property
    def seconds(self) -> float:
        """Of a step.

        Raises:
            ValueError: if the time was not asked for.
        """
        if self.time is None:
            raise ValueError("the plan has no time")
        return self.time.total

    @property
    def structure(self) -> tuple[int, ...]:
        """Sizes of the dims."""
        x = self.layout
        return x.pp, x.dp_replicate, x.dp, x.cp, x.tp


def out_of_memory(part: float) -> float:
    """Probability that a process runs out of memory which is to take ``part`` of what is usable.

    The logistic curve that is likeliest for 317 published runs with labels (docs/planning.md), of
    an allocator without expandable segments.
    """
    return 1 / (1 + math.exp(16 * (0.91 - part)))


class Search:
    """The layouts of one training: a model, a global batch, and GPUs of a kind.

    Attributes:
        rejected: why layouts are impossible, or hold too much, and how many.
    """

    def __init__(
        self,
        model: LlamaConfig,
        machine: Machine,
        options: Options,
        global_batch_size: int,
        sequence_parallel: str = "auto",
    ):
        """``sequence_parallel`` is that of the training: on, off, or auto, on CUDA where it divides
        the sequence."""
        self.model, self.machine, self.options = model, machine, options
        self.global_batch_size, self.sequence_parallel = global_batch_size, sequence_parallel
        self.rejected: collections.Counter[str] = collections.Counter()
        self._known: dict[tuple[object, ...], Any] = {}

    def stages(self, layout: Layout) -> list[Stage]:
        """As :meth:`parallel.layout.Layout.stages`, each cut worked out once."""
        key = "stages", layout.pp, layout.pp_schedule
        return self._once(key, lambda: layout.stages(self.model, self.options.seq_len))

    def layouts(self, gpus: int, keep: dict) -> Iterator[Layout]:
        """Every layout of ``gpus`` that can be built; why the others cannot goes to ``rejected``.

        Args:
            keep: what is to stay: sizes of dims by name, zero, pp_schedule, micro_batch_size.
        """
        sizes = divisors(gpus)
        tried = {name: (keep[name],) if name in keep else sizes for name in DIMS}
        for pp in tried["pp"]:
            for tp in tried["tp"]:
                if self.leaves_node(tp, gpus) and "tp" not in keep:
                    self.rejected[f"tp {tp} leaves nodes of {self.machine.node}; see --keep"] += 1
                    continue
                for cp in tried["cp"]:
                    for replicate in tried["dp_replicate"]:
                        if gpus % (pp * tp * cp * replicate) == 0:
                            shape = {"pp": pp, "tp": tp, "cp": cp, "dp_replicate": replicate}
                            yield from self._cut(gpus, keep, shape)

    def leaves_node(self, tp: int, gpus: int) -> bool:
        """Whether tensor parallelism would cross a network."""
        return gpus > self.machine.node and ranks_on_a_node(tp, 1, self.machine.node) < tp

    def _cut(self, gpus: int, keep: dict, shape: dict) -> Iterator[Layout]:
        """The ZeRO stages, schedules and micro-batches of a shape."""
        ranks = gpus // (shape["pp"] * shape["cp"] * shape["tp"])
        zeros: Sequence[int] = (keep["zero"],) if "zero" in keep else ZEROS
        if "zero" not in keep and shape["dp_replicate"] > 1:
            zeros = [z for z in zeros if z >= 2]  # replicas of ZeRO-1 would shard less
        elif "zero" not in keep and ranks == 1:
            zeros = [z for z in zeros if z]  # which is ZeRO-1 where there are no replicas
        schedules = ("1f1b",) if shape["pp"] == 1 else SCHEDULES_TRIED
        if "pp_schedule" in keep and shape["pp"] > 1:
            schedules = (keep["pp_schedule"],)
        sizes = (keep["micro_batch_size"],) if "micro_batch_size" in keep else BATCH_SIZES
        for zero in zeros:
            for schedule in schedules:
                for size in sizes:
                    share = self.global_batch_size // ranks
                    if size > 1 and share % size and "micro_batch_size" not in keep:
                        continue
                    try:
                        yield self.layout(
                            keep.get("activation_checkpoint", "none"),
                            world_size=gpus,
                            micro_batch_size=size,
                            zero=zero,
                            pp_schedule=schedule,
                            **shape,
                        )
                    except LayoutError as error:
                        self.rejected[_short(str(error))] += 1
                        break  # larger micro-batches are fewer

    def layout(self, checkpoint: str = "none", **sizes) -> Layout:
        """A layout of these sizes, checked as training checks it with this checkpointing.

        Raises:
            LayoutError: if it cannot be built.
        """
        dims = Dims(**{name: sizes.pop(name) for name in DIMS if name in sizes})
        world_size = sizes.pop("world_size")
        layout = make_layout(world_size, dims, global_batch_size=self.global_batch_size, **sizes)
        sequence_parallel = self._options(layout).sequence_parallel
        check_tensor_parallel(self.model, layout, self.options.seq_len, sequence_parallel)
        check_pipeline(self.model, layout, checkpoint, self.options.compile)
        return layout

    def _options(self, layout: Layout, savers: tuple[str, int] = ("none", 1)) -> Options:
        """With checkpointing and chunks of the loss, and with sequence parallelism or not."""
        local_len = self.options.seq_len // layout.cp
        sequence_parallel = use_sequence_parallel(
            self.sequence_parallel, tp=layout.tp, local_len=local_len, cuda=self.options.cuda
        )
        mode, chunks = savers
        return self._once(
            (sequence_parallel, savers),
            lambda: replace(
                self.options,
                sequence_parallel=sequence_parallel,
                activation_checkpoint=mode,
                loss_chunks=chunks,
            ),
        )

    def memory(self, layout: Layout, options: Options) -> tuple[Memory, int]:
        """What the ranks that hold most hold, and their coordinate in pp."""
        model, x = self.model, layout
        micro = self._once(
            (x.micro_batch_size, x.tp, x.cp, id(options)),
            lambda: micro_batch_bytes(model, layout, options),
        )
        units = self._once((x.tp, x.shards), lambda: unit_sizes(model, layout))
        mode = options.activation_checkpoint
        ranks = self._once((x.pp, x.pp_schedule, mode), lambda: self._largest(layout, mode))
        memories = [(rank_memory(x, options, here, units, micro), here.pp_rank) for here in ranks]
        return max(memories, key=lambda pair: pair[0].total) if len(memories) > 1 else memories[0]

    def _once(self, key: tuple[object, ...], make: Callable[[], T]) -> T:
        """What layouts have in common is worked out once."""
        if key not in self._known:
            self._known[key] = make()
        return self._known[key]

    def _largest(self, layout: Layout, mode: str) -> list[Holding]:
        """Of the ranks that may hold most.

        The later a rank, the fewer micro-batches it has in flight; in a V, the fewer of one stage
        and the more of the other. So, of those with as many blocks and the same ends, the first and
        the last.
        """
        if layout.pp == 1:
            return [holding(self.model, (), mode)]
        kinds: dict[tuple[object, ...], list[Holding]] = {}
        stages = sorted(self.stages(layout), key=lambda stage: stage.pp_rank)
        for _, here in itertools.groupby(stages, lambda stage: stage.pp_rank):
            part = holding(self.model, list(here), mode)
            kinds[part[1:]] = [*kinds.get(part[1:], [])[:1], part]
        v_shaped = SCHEDULES[layout.pp_schedule].v_shaped
        return [part for kind in kinds.values() for part in (kind if v_shaped else kind[:1])]

    def plan(self, layout: Layout, savers: tuple[str, int]) -> Plan:
        """What a layout holds with this checkpointing and these chunks of the loss."""
        options = self._options(layout, savers)
        return Plan(layout, options, *self.memory(layout, options))

    def fits(self, plan: Plan) -> bool:
        """Whether a plan takes no more than is reasonable."""
        return plan.gib <= LIMIT * self.machine.usable_gib

    def risk(self, plan: Plan) -> float:
        """Probability that a plan runs out of memory."""
        return out_of_memory(plan.gib / self.machine.usable_gib)

    def savers(self, layout: Layout, keep: dict) -> list[tuple[str, int]]:
        """Checkpointing and chunks of the loss that a layout can have, the fastest first."""
        kept = keep.get("activation_checkpoint"), keep.get("loss_chunks")
        whole = layout.pp > 1 and SCHEDULES[layout.pp_schedule].splits_backward
        return [
            (mode, chunks)
            for mode in ([kept[0]] if kept[0] else CHECKPOINTING)
            for chunks in ([kept[1]] if kept[1] else LOSS_CHUNKS)
            if mode == "none" or not whole
        ]

    def best(self, layout: Layout, keep: dict, timed: bool = True) -> Plan:
        """The fastest plan of a layout that fits, or else its smallest."""
        savers = self.savers(layout, keep)
        chosen = self.plan(layout, savers[0])
        if not self.fits(chosen):
            x = chosen.memory
            kept = x.total - x.activations - max(x.loss, x.working)
            if kept > LIMIT * self.machine.usable_gib * GIB:
                return chosen
            smallest = self.plan(layout, savers[-1])
            if not self.fits(smallest):
                return smallest
            plans = (self.plan(layout, pair) for pair in savers[1:])
            chosen = next(plan for plan in plans if self.fits(plan))
        return self.timed(chosen) if timed else chosen

    def timed(self, plan: Plan) -> Plan:
        """A plan with its time."""
        stages = self.stages(plan.layout)
        time = step_time(self.model, plan.layout, plan.options, self.machine, stages)
        return replace(plan, time=time)

    def all(self, gpus: int, keep: dict, timed: bool = True) -> list[Plan]:
        """The best plan of every layout that fits; why the others do not goes to ``rejected``.

        The fastest first, but of those that tie with it the ones with the smallest risk of running
        out of memory; or the smallest first where not ``timed``.
        """
        fitting = []
        for layout in self.layouts(gpus, keep):
            plan = self.best(layout, keep, timed)
            if self.fits(plan):
                fitting.append(plan)
            else:
                self.rejected[f"{TOO_MUCH}, most of it {ITEMS[plan.memory.largest]}"] += 1
        if not timed:
            return sorted(fitting, key=lambda plan: plan.gib)
        fastest = min((plan.seconds for plan in fitting), default=0.0)

        def rank(plan: Plan) -> tuple[bool, int, float]:
            seconds = plan.seconds
            slower = seconds > (1 + TIE) * fastest
            # In steps of a twentieth: less is no difference.
            risk = 0 if slower else round(20 * self.risk(plan))
            return slower, risk, seconds

        return sorted(fitting, key=rank)

    def at(self, gpus: int, flags: dict) -> Plan:
        """The plan of these flags, whether it fits or not.

        Args:
            flags: of :meth:`layout`, activation_checkpoint and loss_chunks.

        Raises:
            LayoutError: if it cannot be built.
        """
        flags = dict(flags)
        savers = flags.pop("activation_checkpoint"), flags.pop("loss_chunks")
        layout = self.layout(savers[0], world_size=gpus, **flags)
        return self.timed(self.plan(layout, savers))

    def changes(self, gpus: int, flags: dict) -> list[tuple[dict, Plan]]:
        """What to change of a plan that does not fit so that it does, the fastest first.

        One setting each; where none is enough, two of them, or three.
        """
        sizes = {name: 2 * flags[name] for name in ("tp", "cp", "pp")}
        halves = {
            k: flags[k] // 2 for k in ("dp_replicate", "micro_batch_size") if (flags[k] or 1) > 1
        }
        others = {
            "loss_chunks": (8,),
            "activation_checkpoint": ("full",),
            "zero": (3, 1),
        }
        single = [(name, value) for name, value in (sizes | halves).items()]
        single += [(name, value) for name, values in others.items() for value in values]
        single = [(name, value) for name, value in single if flags[name] != value]
        for count in (1, 2, 3):
            fitting = []
            for some in itertools.combinations(single, count):
                changed = dict(some)
                try:
                    plan = self.at(gpus, {**flags, **changed})
                except LayoutError:
                    continue
                if (
                    len(changed) == count
                    and self.fits(plan)
                    and not self.leaves_node(plan.layout.tp, gpus)
                ):
                    fitting.append((changed, plan))
            if fitting:
                return sorted(fitting, key=lambda pair: pair[1].seconds)
        return []


def _short(message: str) -> str:
    """A refusal without its numbers' context: what the flags ask, and not what to do instead."""
    return message.split(": ")[0]
