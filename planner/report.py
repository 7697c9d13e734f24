"""What a plan says to a person."""

from collections.abc import Sequence

from common.text import bytes_of, columns
from models.config import flops_per_token
from planner.machine import Machine
from planner.memory import ITEMS
from planner.search import (
    CONTEXT_GIB,
    FRAGMENTATION,
    LIMIT,
    TIE,
    TOO_MUCH,
    Plan,
    Search,
)

# Relative errors that nine of ten published runs stay within (docs/planning.md): of memory, with
# FSDP alone and with tp, pp or much cp; of a step by the table and by constants fitted to runs.
# On CPUs, where collectives are not rings, steps of this trainer were off by up to a half.
MEMORY_ERRORS, TIME_ERRORS, CPU_ERROR = (0.05, 0.13), (0.2, 0.12), 0.5
LEGEND = (
    "batch: sequences of a micro-batch x micro-batches of a step; chunks: parts of the loss; "
    "GiB: of {usable:.3g} usable; P(oom): of running out of memory; =: ties with the first, within "
    f"{TIE:.0%}"
)
TIMES = {
    "compute": "computing",
    "tp": "tensor parallel",
    "fsdp": "FSDP, not hidden",
    "cp": "context parallel",
    "pp": "between stages",
    "bubble": "bubble",
    "optimizer": "optimizer",
    "host": "waiting for the host",
}


def memory_interval(plan: Plan) -> float:
    """Relative error to expect of the memory."""
    x = plan.layout
    return MEMORY_ERRORS[x.pp > 1 or x.tp > 1 or x.cp > 4]


def time_interval(machine: Machine) -> float:
    """Relative error to expect of the time."""
    if machine.name == "cpu":
        return CPU_ERROR
    return TIME_ERRORS[machine.learnt]


class Report:
    """The plans of a search as text.

    Attributes:
        price: dollars of a GPU and hour, or None.
    """

    def __init__(self, search: Search, price: float | None):
        self.search, self.price = search, price
        self.machine = search.machine

    def speed(self, plan: Plan) -> float:
        """Tokens per second and GPU."""
        tokens = self.search.global_batch_size * self.search.options.seq_len
        return tokens / plan.seconds / plan.layout.world_size

    def cost(self, plan: Plan) -> float:
        """Dollars per trillion tokens.

        Raises:
            ValueError: if there is no price.
        """
        if self.price is None:
            raise ValueError("the report has no price")
        return 1e12 / self.speed(plan) / 3600 * self.price

    def head(self, fit: int) -> str:
        """What was planned, in a line."""
        too_big = sum(n for why, n in self.search.rejected.items() if why.startswith(TOO_MUCH))
        impossible = self.search.rejected.total() - too_big
        source = self.machine.source or "of the table, not calibrated"
        return (
            f"model {self.search.model.num_parameters / 1e9:.3g}B | {fit + too_big + impossible} "
            f"layouts: {fit} fit, {too_big} take too much memory, {impossible} cannot be built | "
            f"constants {source}"
        )

    def row(self, plan: Plan, name: str) -> tuple[object, ...]:
        """Of the table: a plan in a line."""
        x, o = plan.layout, plan.options
        error = memory_interval(plan) * plan.gib
        row: tuple[object, ...] = (
            name,
            x.name,
            f"{x.zero}",
            x.pp_schedule if x.pp > 1 else "-",
            f"{x.micro_batch_size}x{x.micro_batches}",
            o.activation_checkpoint,
            o.loss_chunks,
            f"{plan.gib:.1f} ±{error:.1f}",
            f"{self.search.risk(plan):.0%}",
        )
        if plan.time is None:
            return row
        speed, peak = self.speed(plan), self.machine.peak_tflops * 1e12
        causal, full = (
            speed * flops_per_token(self.search.model, o.seq_len, half) / peak
            for half in (True, False)
        )
        error = time_interval(self.machine)
        row += (
            f"{plan.time.total:.2f} ±{error * plan.time.total:.2f}",
            f"{speed:,.0f} ±{error * speed:,.0f}",
            f"{causal:.0%}/{full:.0%}",
        )
        if self.price:
            row += (f"{self.cost(plan):,.0f} ±{error * self.cost(plan):,.0f}",)
        return row

    def table(self, plans: list[Plan], top: int) -> list[str]:
        """One line per structure, its best plan; those about as fast as the first have a ``=``."""
        best: dict[tuple[int, ...], Plan] = {}
        for plan in plans:
            best.setdefault(plan.structure, plan)
        shown = list(best.values())[:top]
        head = ["#", "layout", "zero", "schedule", "batch", "checkpoint", "chunks", "GiB", "P(oom)"]
        if shown and shown[0].time:
            head += ["step s", "tokens/s/GPU", "MFU causal/full"]
            head += ["$/1T tokens"] if self.price else []
        rows: list[Sequence[object]] = [head]
        for number, plan in enumerate(shown, start=1):
            tie = plan.time and plan.seconds <= (1 + TIE) * shown[0].seconds
            rows.append(self.row(plan, f"{number}{'=' if tie and len(shown) > 1 else ''}"))
        legend = LEGEND.format(usable=self.machine.usable_gib)
        return [*columns(rows), *([legend] if shown else [])]

    def items(self, plan: Plan) -> list[str]:
        """Memory of the fullest ranks and time of the slowest, item by item."""
        total = plan.memory.total
        where = f", ranks of pp {plan.pp_rank}" if plan.layout.pp > 1 else ""
        rows = [
            (f"  {bytes_of(size)}", f"{size / total:.0%}", ITEMS[name])
            for name, size in vars(plan.memory).items()
            if size
        ]
        if plan.options.cuda:
            rows.append((f"  x {FRAGMENTATION}", "", "what the caching allocator reserves beside"))
            rows.append((f"  {CONTEXT_GIB:.2f} GiB", "", "context and communicators of CUDA"))
            rows.append((f"  {plan.gib:.2f} GiB", "", "in all"))
        lines = [f"memory of {plan.layout.name}{where}; of loss and block the larger counts:"]
        lines += columns(rows)
        if plan.time:
            parts = (
                f"{TIMES[name]} {seconds:.2f} s ({seconds / plan.time.total:.0%})"
                for name, seconds in vars(plan.time).items()
                if seconds
            )
            lines += ["time: " + ", ".join(parts)]
        return lines

    def compare(self, plan: Plan, other: Plan, what: str) -> str:
        """Why ``other`` is slower than ``plan``, or what it lacks to fit."""
        x, risk = other.layout, f"P(oom) {self.search.risk(other):.0%}"
        what += f" ({x.name}, ZeRO-{x.zero}, batch {x.micro_batch_size}x{x.micro_batches})"
        if not self.search.fits(other):
            limit, usable = LIMIT * self.machine.usable_gib, self.machine.usable_gib
            return (
                f"{what} takes {other.gib:.1f} GiB, {other.gib - limit:.1f} above what a plan may "
                f"take, {LIMIT:.0%} of the {usable:.1f} of a {self.machine.name} ({risk}): most is "
                f"{ITEMS[other.memory.largest]}"
            )
        gap = {k: v - vars(plan.time)[k] for k, v in vars(other.time).items()}
        ratio = other.seconds / plan.seconds - 1
        if abs(ratio) < 5e-4:
            return f"{what} takes as long"
        seen = {k: v for k, v in gap.items() if abs(v) >= 0.002 * plan.seconds}
        terms = (f"{TIMES[k]} {seen[k]:+.3g} s" for k in sorted(seen, key=lambda k: -abs(seen[k])))
        tie = ", a tie" if abs(ratio) <= TIE else ""
        return (
            f"{what} takes {ratio:+.1%} time{tie} ({', '.join(terms)}), and {other.gib:.1f} GiB "
            f"({risk})"
        )

    def suggestions(self, flags: dict, plan: Plan, top: int = 5) -> list[str]:
        """What to change of a plan so that it fits."""
        rows = [
            (
                "  " + " ".join(f"--{k.replace('_', '-')} {v}" for k, v in changed.items()),
                f"{better.gib - plan.gib:+.1f} GiB",
                f"to {better.gib:.1f}",
                f"{better.seconds / plan.seconds - 1:+.1%} time",
            )
            for changed, better in self.search.changes(plan.layout.world_size, flags)[:top]
        ]
        if not rows:
            return ["no three changes of it are enough: use more GPUs, or a layout of the table"]
        return ["so that it fits, the fastest first:", *columns(rows)]

    def warnings(self, plans: list[Plan]) -> list[str]:
        """What of plans no published run, or only a few of another trainer, validate."""
        layouts, notes = [plan.layout for plan in plans], []
        if plans[0].time:
            if not self.machine.source:
                notes.append("times: constants of a table; use --calibrate, or --learn from a run")
            if any(x.cp > 1 for x in layouts):
                notes.append("context parallel: its time")
            if any(x.pp > 1 and x.world_size > self.machine.node for x in layouts):
                notes.append("pipelines across nodes: their time")
        if self.machine.name in ("b200", "mi300x", "h100-pcie", "cpu"):
            notes.append(f"{self.machine.name}: no published run is compared with")
        if self.search.options.seq_len > 131072 or layouts[0].world_size > 2048:
            notes.append("sequences above 131072 tokens, or more than 2048 GPUs")
        if self.search.options.compile:
            notes.append("what compilation saves of memory: it is not counted")
        if self.search.options.cpu_offload:
            notes.append("offloading: the time of the copies, which is not counted")
        notes.append("fp8 and expert parallelism: not in this repository")
        return ["not validated: " + "; ".join(notes)]

    def rejected(self, top: int = 6) -> list[str]:
        """Why layouts are not in the table, with their number."""
        most, every = self.search.rejected.most_common(top), self.search.rejected.total()
        rows = [(f"  {n}", why) for why, n in most]
        if others := every - sum(n for _, n in most):
            rows.append((f"  {others}", "for other reasons"))
        return ["not in the table:", *columns(rows)] if rows else []
