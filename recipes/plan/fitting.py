"""Constants of a machine from seconds measured on it. Torch-free."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from planner.machine import Machine, ranks_on_a_node
from recipes.plan.learn import BOUNDS

# Of a device that is not in the table, where no collective was measured, in GB/s.
ASSUMED_LINK, ASSUMED_NIC = 10.0, 1.0
# FLOPs of a product that reaches half of the rate, where small ones are as fast as large ones.
LEAST_HALF = 1e3
# Of the forward's FLOPs, those of forward and backward of attention, as planner/time.py counts.
ATTENTION = 3.5


@dataclass(frozen=True)
class Work:
    """Something of which FLOPs or bytes are known: ``amount`` of them in ``seconds``."""

    name: str
    amount: float
    seconds: float


@dataclass(frozen=True)
class Sent:
    """A collective; ``size`` to ``kind`` are those of :meth:`Machine.collective_seconds`."""

    dim: str
    size: int
    ranks: int
    stride: int
    kind: str
    seconds: float

    @property
    def factor(self) -> int:
        """How often a ring goes round."""
        return 2 if self.kind == "all_reduce" else 1

    @property
    def moved(self) -> float:
        """Bytes that a rank sends in one round."""
        return self.size if self.kind == "send" else self.size * (self.ranks - 1) / self.ranks

    def here(self, node: int) -> int:
        """How many ranks of a group share a node of ``node`` ranks."""
        return ranks_on_a_node(self.ranks, self.stride, node)


@dataclass(frozen=True)
class BlockTime:
    """Seconds of forward and backward of a block, and what the planner's formula gives."""

    name: str
    predict: Callable[[Machine], float]
    seconds: float


@dataclass
class Measured:
    """What a calibration has measured; all seconds are those of the slowest rank.

    Attributes:
        products: single matrix products, in FLOPs.
        attention: forward and backward, in causal FLOPs of the forward.
        memory: elementwise traffic, in bytes.
        floors: seconds in which a block is queued, eager and, if measured, compiled.
        blocks: likewise, at the tokens of the training.
        beside: seconds of computing alone, of a transfer alone, and of both at once.
    """

    products: list[Work]
    attention: list[Work]
    memory: list[Work]
    floors: list[float]
    blocks: list[BlockTime]
    sent: list[Sent] = field(default_factory=list)
    beside: tuple[float, float, float] | None = None


def fit_terms(rows: Sequence[Sequence[float]], seconds: Sequence[float]) -> list[float]:
    """The factors >= 0 of the terms of ``rows`` with which the mean |log(sum / seconds)| is about
    the smallest; 0 where a term has no part in it.

    Non-negative least squares, reweighted until its squares are those absolute values, so that a
    measurement which the machine has disturbed moves nothing.
    """
    from scipy.optimize import nnls

    terms, target = np.array(rows, dtype=float), np.array(seconds, dtype=float)
    scale = np.maximum(terms.max(axis=0), 1e-300)
    weights = 1 / target
    for _ in range(50):
        factors = nnls(terms / scale * weights[:, None], target * weights)[0] / scale
        sums = np.maximum(terms @ factors, 1e-3 * target)
        # With these weights the squares have the slope of the absolute logarithms.
        weights = 1 / np.sqrt(sums * np.maximum(abs(sums - target), 0.01 * target))
    return factors.tolist()


def fit_products(products: Sequence[Work]) -> tuple[float, float]:
    """Rate, in FLOP/s, and the FLOPs of a product that reaches half of it, at least LEAST_HALF."""
    slope, fixed = fit_terms([(x.amount, 1.0) for x in products], [x.seconds for x in products])
    rate = 1 / slope if slope else max(x.amount / x.seconds for x in products)
    return rate, max(fixed * rate, LEAST_HALF)


def fit_rate(works: Sequence[Work], factor: float = 1.0) -> float:
    """Amount per second, of ``factor`` times the amounts."""
    rows, seconds = [(factor * x.amount,) for x in works], [x.seconds for x in works]
    return 1 / fit_terms(rows, seconds)[0]


def fit_network(sent: Sequence[Sent], machine: Machine) -> dict[str, float]:
    """``link``, ``nic`` and ``latency``, of what says something about them."""
    rows = []
    for x in sent:
        here = x.here(machine.node)
        inside = min(machine.link_gbs, machine.peer_gbs * (here - 1)) * 1e9
        if here == x.ranks:
            rows.append((x.moved / inside, 0.0, 1.0))
        else:
            hops = 1 + 2 * math.sqrt(-(-x.ranks // here))
            rows.append((0.0, x.moved / (here * machine.nic_gbs * 1e9), hops))
    if not rows:
        return {}
    link, nic, latency = fit_terms(rows, [x.seconds / x.factor for x in sent])
    constants = {name: 1 / slope for name, slope in (("link", link), ("nic", nic)) if slope}
    return constants | {"latency": max(latency, 1e-7)}


def overlap(computing: float, transfer: float, both: float) -> float:
    """Part of the computing under which a transfer hides."""
    return (computing + transfer - both) / min(computing, transfer)


def memory_part(block: BlockTime, machine: Machine) -> float | None:
    """The ``hbm`` with which the formula gives the block's seconds; None if none does."""

    def predict(hbm: float) -> float:
        return block.predict(replace(machine, constants=replace(machine.constants, hbm=hbm)))

    moving = predict(0.5) - predict(1.0)
    left = block.seconds - (predict(1.0) - moving)
    return moving / left if left > 0 else None


def measured_machine(name: str, usable_gib: float, node: int, measured: Measured) -> Machine:
    """A device that is not in the table: its figures are the best that were measured."""
    rate, half = fit_products(measured.products)
    best = max(rate, *(x.amount / x.seconds for x in measured.products)) / 1e12
    buses = {True: [], False: []}
    for x in measured.sent:
        here = x.here(node)
        speed = x.factor * x.moved / x.seconds / 1e9
        buses[here == x.ranks].append(speed if here == x.ranks else speed / here)
    link = max(buses[True], default=ASSUMED_LINK)
    return Machine(
        name=name,
        usable_gib=usable_gib,
        peak_tflops=best,
        matmul_tflops=best,
        half_gflop=half / 1e9,
        hbm_tbs=max(x.amount / x.seconds for x in measured.memory) / 1e12,
        link_gbs=link,
        peer_gbs=link,
        nic_gbs=max(buses[False], default=ASSUMED_NIC),
        node=node,
    )


def fit_machine(machine: Machine, measured: Measured) -> tuple[Machine, list[str]]:
    """The machine with constants that were fitted, and notes on what a reader should know.

    ``host`` is of compiled blocks, times nine, where they were measured. ``hbm`` is what explains a
    block that is not waiting for the host, as it has more to do than a plain copy; else the copy's.
    """
    rate, half = fit_products(measured.products)
    part = machine.matmul_tflops * 1e12
    values = {
        "matmul": rate / part,
        "half": half / (machine.half_gflop * 1e9),
        "attention": fit_rate(measured.attention, ATTENTION) / part,
        "hbm": fit_rate(measured.memory) / (machine.hbm_tbs * 1e12),
        "host": measured.floors[-1] * (9 if len(measured.floors) > 1 else 1),
        **fit_network(measured.sent, machine),
    }
    if measured.beside:
        values["overlap"] = overlap(*measured.beside)
    notes = [] if measured.sent else ["collectives: not measured by one process; as they were"]
    if len(measured.floors) > 1:
        eager, compiled = measured.floors
        notes.append(f"host: nine times a compiled block's {compiled:.3g} s; eager {eager:.3g} s")
    fitted, outside = _bounded(machine, values)
    block, floor = measured.blocks[-1], measured.floors[-1]
    hbm = memory_part(block, fitted)
    if hbm and block.seconds > 1.5 * floor:
        notes.append(
            f"hbm: {values['hbm']:.3g} of elementwise traffic alone; {hbm:.3g} explains the block"
        )
        fitted, outside = _bounded(machine, {**values, "hbm": hbm})
    return fitted, [*notes, *outside]


def _bounded(machine: Machine, values: dict[str, float]) -> tuple[Machine, list[str]]:
    notes = []
    for name, value in values.items():
        low, high = BOUNDS.get(name, (0.0, math.inf))
        values = {**values, name: min(high, max(low, value))}
        if values[name] != value:
            notes.append(f"{name}: {value:.3g} was measured, and {values[name]:g} is its bound")
    return replace(machine, constants=replace(machine.constants, **values)), notes


def predictions(measured: Measured, machine: Machine) -> list[tuple[str, float, float]]:
    """What was measured, its seconds, and those that ``machine`` predicts."""
    table = [(x.name, x.seconds, machine.product_seconds(x.amount)) for x in measured.products]
    table += [
        (x.name, x.seconds, ATTENTION * machine.attention_seconds(x.amount))
        for x in measured.attention
    ]
    table += [(x.name, x.seconds, machine.memory_seconds(x.amount)) for x in measured.memory]
    for name, seconds, times in zip(
        ("eager", "compiled"), measured.floors, (1, 1 / 9), strict=False
    ):
        table.append((f"narrow block, {name}", seconds, times * machine.constants.host))
    table += [(x.name, x.seconds, x.predict(machine)) for x in measured.blocks]
    for x in measured.sent:
        predicted = machine.collective_seconds(x.size, x.ranks, x.stride, x.kind)
        name = f"{x.kind} over {x.dim} ({x.ranks} ranks), {x.size / 2**20:.3g} MiB"
        table.append((name, x.seconds, predicted))
    if measured.beside:
        computing, transfer, both = measured.beside
        hidden = machine.constants.overlap * min(computing, transfer)
        table.append(("products beside all_gather", both, computing + transfer - hidden))
    return table
