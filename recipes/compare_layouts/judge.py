"""Rounding or a bug? The verdict over a run and the reference that it should reproduce.

In float64 the deviation of rounding stays below 1e-10, so anything above is a bug. Fingerprints
locate the bug: the verdict names the first stage of a step whose fingerprint differs. A run with
``--grad-compression`` loses digits by intent. Its stages are judged like any other's before the
first compressed gradient, and by a bound from there on; in float64 nothing else is lost.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from parallel.layout import POWERSGD_START

# The largest relative deviation that is no difference, by step and stage.
Bound = Callable[[int, str], float]
QUANTITIES = ("loss", "grad_norm")  # the numbers of metrics.jsonl that are compared
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
    is flat along most directions: 32 times for "grad_norm". This bound is an envelope of what
    docs/numerics.md measures, not a theorem; the verdict is taken in float64, not from this bound.
    """
    factor = {"loss": 1, "grad_norm": 32}[quantity]
    return factor * UNIT_ROUNDOFF[dtype] * (16 + 2 * np.asarray(steps, dtype=np.float64) ** 2)


@dataclass(frozen=True)
class Lossy:
    """What the gradient compression of a run loses.

    Attributes:
        compression: the value of ``--grad-compression``.
        ranks: data-parallel ranks whose gradients are summed.
    """

    compression: str
    ranks: int

    @property
    def first_step(self) -> int:
        """The first optimizer step whose gradients are compressed."""
        return POWERSGD_START + 1 if self.compression == "powersgd" else 1

    def bound(self, step: int, stage: str) -> float:
        """Largest relative deviation that the compression explains at a stage of a step.

        For the first gradients that are sent in 16 bits, of unit roundoff u: every rank rounds its
        part once, and a sum of n parts is rounded n - 1 times, which gives ``u * sqrt(n)`` for
        independent errors; the bound is twice that. For what follows, ``4 * sqrt(n) * (1 + steps)``
        times the u of bfloat16, for both: AdamW divides a gradient by its size, so that where
        rounding decides the sign of a small gradient, the weight moves by as much in either. The
        loss is flat along most directions and has a 32nd of that. PowerSGD misses at most all of
        its first gradient. The bounds of the curves are envelopes of what docs/numerics.md
        measures.
        """
        upstream = stage in ("tokens", "weights", "activations", "loss")
        if step < self.first_step or (step == self.first_step and upstream) or stage == "tokens":
            return LIMIT
        first = step == self.first_step and stage in ("gradients", "grad_norm")
        if self.compression == "powersgd":
            return 1.0 if first else POWERSGD_BOUND.get(stage, np.inf)
        if first:
            return 2 * SENT_ROUNDOFF[self.compression] * self.ranks**0.5
        drift = 4 * SENT_ROUNDOFF["bf16"] * self.ranks**0.5 * (1 + step)
        return drift / 32 if stage == "loss" else drift


@dataclass(frozen=True)
class Verdict:
    """The verdict over one layout.

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


def _read_fingerprints(run: Path) -> list[dict]:
    # Files of older versions call the stage "rung".
    return [{"stage": row.get("rung"), **row} for row in _read(run / "fingerprints.jsonl")]


def relative_deviation(value: float, reference: float) -> float:
    """|a - b| / |b|, or |a - b| where b is 0."""
    return abs(value - reference) / (abs(reference) or 1.0)


def _fingerprint_deviation(stage: str, value: list, reference: list) -> float:
    """Deviation of a fingerprint: of its squared norm, and of its projection against its norm."""
    if stage == "tokens":
        return 0.0 if value == reference and value[1] == 0 else np.inf
    if stage in QUANTITIES:
        return relative_deviation(value[0], reference[0])
    scale = max(reference[1], np.finfo(np.float64).tiny)
    projected = abs(value[0] - reference[0]) / scale**0.5
    return max(projected, abs(value[1] - reference[1]) / scale)


def _first_difference(reference: Path, run: Path, bound: Bound) -> str | None:
    """The first fingerprint that differs between two float64 runs, as a line of text.

    Raises:
        ValueError: if a run has no fingerprints, or the two recorded different things.
    """
    rows, expected = _read_fingerprints(run), _read_fingerprints(reference)
    if not expected or len(expected) != len(rows):
        raise ValueError(f"{reference} and {run} did not record the same steps")
    for a, b in zip(rows, expected, strict=True):
        step, stage = a["step"], a["stage"]
        if (step, stage) != (b["step"], b["stage"]):
            raise ValueError(f"{reference} and {run} did not record the same stages")
        if a["values"].keys() != b["values"].keys():
            only = sorted(a["values"].keys() ^ b["values"].keys())
            return f"step {step}, {stage}: {only[0]} exists in one run only"
        for name, value in a["values"].items():
            other = b["values"][name]
            deviation = _fingerprint_deviation(stage, value, other)
            if not deviation <= bound(step, stage):
                # The projection is shown, or the norm where the projections are equal.
                k = 0 if value[0] != other[0] else 1
                what = name if name == stage else f"{stage}: {name}"
                return (
                    f"step {step}, {what} is {value[k]!r}, in the reference {other[k]!r} "
                    f"(relative deviation {deviation:.1e})"
                )
    return None


def _not_compressed(reference: Path, run: Path, lossy: Lossy) -> str | None:
    """A line that says that no gradient of the first compressed step was compressed, or None."""
    at = lossy.first_step, "gradients"
    expected, gradients = (
        next(r["values"] for r in _read_fingerprints(path) if (r["step"], r["stage"]) == at)
        for path in (reference, run)
    )
    if any(_fingerprint_deviation(at[1], gradients[k], expected[k]) > LIMIT for k in gradients):
        return None
    return (
        f"step {lossy.first_step}, gradients: all are equal to 1e-10, but --grad-compression "
        f"{lossy.compression} loses more: they were not compressed"
    )


def _compare_metrics(reference: Path, run: Path, bound: Bound) -> tuple[float, str | None, int]:
    """Largest deviation of metrics.jsonl, the first that is above its bound, and the last step."""
    expected = {row["step"]: row for row in _read(reference / "metrics.jsonl")}
    rows = _read(run / "metrics.jsonl")
    if {row["step"] for row in rows} - expected.keys():
        raise ValueError(f"{reference} and {run} did not log the same steps")
    largest, finding = 0.0, None
    for row in rows:
        for quantity in QUANTITIES:
            a, b = row[quantity], expected[row["step"]][quantity]
            deviation = np.inf if (a is None) != (b is None) else 0.0
            if a is not None and b is not None:
                deviation = relative_deviation(a, b)
            if deviation > bound(row["step"], quantity) and finding is None:
                finding = (
                    f"step {row['step']}, {quantity} is {a!r}, not {b!r} "
                    "(in metrics.jsonl only: every recorded fingerprint agrees)"
                )
            largest = max(largest, deviation)
    return largest, finding, rows[-1]["step"]


def judge(
    reference: Path, runs: dict[str, Path], lossy: dict[str, Lossy] | None = None
) -> list[Verdict]:
    """Judge float64 runs, by layout name, against the reference run.

    Each run directory needs ``metrics.jsonl`` with every step, and ``fingerprints.jsonl``.

    Args:
        lossy: what the runs that are in it lose by intent. The reference loses nothing.

    Raises:
        ValueError: if the runs did not record the same things.
    """
    verdicts = []
    for layout, run in runs.items():
        compressed = (lossy or {}).get(layout)
        bound = compressed.bound if compressed else lambda step, stage: LIMIT
        deviation, metrics_finding, last_step = _compare_metrics(reference, run, bound)
        finding = _first_difference(reference, run, bound) or metrics_finding
        last_bound = None
        if compressed:
            finding = finding or _not_compressed(reference, run, compressed)
            last_bound = max(bound(last_step, quantity) for quantity in QUANTITIES)
        verdicts.append(Verdict(layout, deviation, finding, last_bound))
    return verdicts
