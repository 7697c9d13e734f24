"""Rounding or a bug? The judgement over two runs that should be the same run.

In float64 a difference of rounding stays below 1e-10, so what is above it is a fault. Where it is,
a ladder of fingerprints tells: the first rung that differs, in the order of a step.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

LIMIT = 1e-10
# Half the distance between neighbouring numbers at 1.
UNIT_ROUNDOFF = {"bfloat16": 2.0**-9, "float32": 2.0**-24, "float64": 2.0**-53}


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
class Verdict:
    """The judgement of one layout.

    Attributes:
        layout: its name.
        deviation: largest relative deviation of loss and gradient norm from the reference.
        finding: what differs first, in one line with both numbers; None if all is rounding.
    """

    layout: str
    deviation: float
    finding: str | None


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


def first_difference(reference: Path, run: Path) -> str | None:
    """The first fingerprint that differs between two float64 runs, as a line of text.

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
            if not deviation <= LIMIT:
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


def judge(reference: Path, runs: dict[str, Path]) -> list[Verdict]:
    """Judge float64 runs, by layout name, against the reference run.

    Each run directory needs ``metrics.jsonl`` with every step, and ``fingerprints.jsonl``.
    """
    expected = {row["step"]: row for row in _read(reference / "metrics.jsonl")}
    verdicts = []
    for layout, run in runs.items():
        rows = _read(run / "metrics.jsonl")
        deviation, worst = 0.0, None
        for row in rows:
            for key in ("loss", "grad_norm"):
                a, b = row[key], expected[row["step"]][key]
                here = np.inf if (a is None) != (b is None) else 0.0
                if a is not None and b is not None:
                    here = float(relative_deviation(np.array(a), np.array(b)))
                if here > deviation:
                    deviation, worst = here, f"step {row['step']}, {key} is {a!r}, not {b!r}"
        finding = first_difference(reference, run)
        if finding is None and deviation > LIMIT:
            finding = f"{worst} (in metrics.jsonl only: every recorded fingerprint agrees)"
        verdicts.append(Verdict(layout, deviation, finding))
    return verdicts
