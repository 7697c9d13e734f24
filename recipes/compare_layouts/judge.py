"""Rounding or a bug? The judgement over two runs that should be the same run.

In float64 a difference of rounding stays below 1e-10, so what is above it is a fault. Where it is,
a ladder of fingerprints tells: the first rung that differs, in the order of a step. A run with
``--grad-compression`` loses more, on purpose: up to the first gradient that is compressed it is
judged like any other, and from there on by a bound. In float64 the compression is all it loses.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from parallel.layout import POWERSGD_START

LIMIT = 1e-10
# Half the distance between neighbouring numbers at 1.
UNIT_ROUNDOFF = {"bfloat16": 2.0**-8, "float32": 2.0**-24, "float64": 2.0**-53}
# Of the numbers that --grad-compression sends.
SENT_ROUNDOFF = {"bf16": 2.0**-8, "fp16": 2.0**-11}
# Of PowerSGD's curves: measured, not derived, and with the recipe debug alone.
POWERSGD_BOUND = {"loss": 0.1, "grad_norm": 1.0}


def rounding_bound(dtype: str, steps: np.ndarray, quantity: str = "loss") -> np.ndarray:
    """Largest relative deviation of a curve that rounding explains, at each step.

    ``u * (16 + 2 * steps**2)`` for the loss, with the unit roundoff u of ``dtype``: a loss is a
    mean over many rounded terms (the 16), and every step adds the rounding of its update to the
    weights, a drift that grows with the steps and from which later gradients are computed (the
    square). A small change of the weights changes a gradient by more than the loss, since the loss
    is flat along most directions: 32 times for "grad_norm". An envelope of what docs/numerics.md
    measures, not a theorem; float64 decides, not this bound.
    """
    factor = {"loss": 1, "grad_norm": 32}[quantity]
    return factor * UNIT_ROUNDOFF[dtype] * (16 + 2 * np.asarray(steps, dtype=np.float64) ** 2)


@dataclass(frozen=True)
class Lossy:
    """What a run loses on purpose.

    Attributes:
        compression: its ``--grad-compression``.
        ranks: data-parallel ranks whose gradients are summed.
    """

    compression: str
    ranks: int

    @property
    def first_step(self) -> int:
        """The first optimizer step whose gradients are compressed."""
        return POWERSGD_START + 1 if self.compression == "powersgd" else 1

    def bound(self, step: int, rung: str) -> float:
        """Largest relative deviation that the compression explains at a rung of a step.

        The first gradients that are sent in 16 bits, of unit roundoff u: every rank rounds its part
        once, and a sum of n parts is rounded n - 1 times, ``u * sqrt(n)`` for errors that do not
        know of each other; twice that is allowed. What follows is ``4 * sqrt(n) * (1 + steps)``
        times the u of bfloat16 for both, since AdamW divides a gradient by its size: where rounding
        decides the sign of a small one, the weight moves by as much in either; a 32nd of it for the
        loss, which is flat along most directions. What PowerSGD misses of its first gradient is at
        most all of it. The curves' bounds are envelopes of what docs/numerics.md measures.
        """
        upstream = rung in ("tokens", "weights", "activations", "loss")
        if step < self.first_step or (step == self.first_step and upstream) or rung == "tokens":
            return LIMIT
        first = step == self.first_step and rung in ("gradients", "grad_norm")
        if self.compression == "powersgd":
            return 1.0 if first else POWERSGD_BOUND.get(rung, np.inf)
        if first:
            return 2 * SENT_ROUNDOFF[self.compression] * self.ranks**0.5
        drift = 4 * SENT_ROUNDOFF["bf16"] * self.ranks**0.5 * (1 + step)
        return drift / 32 if rung == "loss" else drift


@dataclass(frozen=True)
class Verdict:
    """The judgement of one layout.

    Attributes:
        layout: its name.
        deviation: largest relative deviation of loss and gradient norm from the reference.
        finding: what differs first, in one line with both numbers; None if nothing is wrong.
        bound: of the deviation at the last step, where gradients are compressed; None where only
            rounding is allowed.
    """

    layout: str
    deviation: float
    finding: str | None
    bound: float | None = None


def _read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def relative_deviation(found: np.ndarray, reference: np.ndarray) -> np.ndarray:
    """|a - b| / |b| of each number; 0 where both are 0."""
    scale = np.where(reference == 0, 1, np.abs(reference))
    return np.abs(found - reference) / scale


def _pair_deviation(rung: str, found: list, reference: list) -> float:
    """Deviation of a fingerprint: of its squared norm, and of its projection against its norm."""
    if rung == "tokens":
        return 0.0 if found == reference and found[1] == 0 else np.inf
    if rung in ("loss", "grad_norm"):
        return float(relative_deviation(np.array(found[0]), np.array(reference[0])))
    scale = max(reference[1], np.finfo(np.float64).tiny)
    projected = abs(found[0] - reference[0]) / scale**0.5
    return max(projected, abs(found[1] - reference[1]) / scale)


def _exact(step: int, rung: str) -> float:
    return LIMIT


def first_difference(
    reference: Path, run: Path, bound: Callable[[int, str], float] = _exact
) -> str | None:
    """The first fingerprint that differs between two float64 runs, as a line of text.

    Args:
        bound: largest relative deviation of a step and rung that is none.

    Raises:
        ValueError: if a run has no fingerprints, or the two recorded different things.
    """
    expected, found = (_read(path / "fingerprints.jsonl") for path in (reference, run))
    if not expected or len(expected) != len(found):
        raise ValueError(f"{reference} and {run} did not record the same steps")
    for a, b in zip(found, expected, strict=True):
        if (a["step"], a["rung"]) != (b["step"], b["rung"]):
            raise ValueError(f"{reference} and {run} did not record the same rungs")
        if a["values"].keys() != b["values"].keys():
            only = sorted(a["values"].keys() ^ b["values"].keys())
            return f"step {a['step']}, {a['rung']}: {only[0]} exists in one run only"
        for name, value in a["values"].items():
            other = b["values"][name]
            deviation = _pair_deviation(a["rung"], value, other)
            if not deviation <= bound(a["step"], a["rung"]):
                return _line(a["step"], a["rung"], name, value, other, deviation)
    return None


def _line(step: int, rung: str, name: str, value: list, other: list, deviation: float) -> str:
    # Numbers that differ in what is not printed would puzzle a reader.
    k = 0 if value[0] != other[0] else 1
    what = name if name == rung else f"{rung}: {name}"
    return (
        f"step {step}, {what} is {value[k]!r}, in the reference {other[k]!r} "
        f"(relative deviation {deviation:.1e})"
    )


def untouched(reference: Path, run: Path, lossy: Lossy) -> str | None:
    """What says that no gradient was compressed, where they should have been, as a line of text."""
    gradients = [
        next(
            row["values"]
            for row in _read(path / "fingerprints.jsonl")
            if (row["step"], row["rung"]) == (lossy.first_step, "gradients")
        )
        for path in (reference, run)
    ]
    expected, found = gradients
    if any(_pair_deviation("gradients", found[k], expected[k]) > LIMIT for k in found):
        return None
    return (
        f"step {lossy.first_step}, gradients: all are equal to 1e-10, but --grad-compression "
        f"{lossy.compression} loses more: they were not compressed"
    )


def judge(
    reference: Path, runs: dict[str, Path], lossy: dict[str, Lossy] | None = None
) -> list[Verdict]:
    """Judge float64 runs, by layout name, against the reference run.

    Each run directory needs ``metrics.jsonl`` with every step, and ``fingerprints.jsonl``.

    Args:
        lossy: what the runs that are in it lose on purpose. The reference loses nothing.
    """
    expected = {row["step"]: row for row in _read(reference / "metrics.jsonl")}
    verdicts = []
    for layout, run in runs.items():
        loss = (lossy or {}).get(layout)
        bound = loss.bound if loss else _exact
        rows = _read(run / "metrics.jsonl")
        deviation, worst = 0.0, None
        if {row["step"] for row in rows} - expected.keys():
            raise ValueError(f"{reference} and {run} did not log the same steps")
        for row in rows:
            for key in ("loss", "grad_norm"):
                a, b = row[key], expected[row["step"]][key]
                here = np.inf if (a is None) != (b is None) else 0.0
                if a is not None and b is not None:
                    here = float(relative_deviation(np.array(a), np.array(b)))
                if here > bound(row["step"], key) and worst is None:
                    worst = f"step {row['step']}, {key} is {a!r}, not {b!r}"
                deviation = max(deviation, here)
        finding = first_difference(reference, run, bound)
        if finding is None and worst:
            finding = f"{worst} (in metrics.jsonl only: every recorded fingerprint agrees)"
        if finding is None and loss:
            finding = untouched(reference, run, loss)
        last = max(bound(rows[-1]["step"], key) for key in ("loss", "grad_norm")) if loss else None
        verdicts.append(Verdict(layout, deviation, finding, last))
    return verdicts
