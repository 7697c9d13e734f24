"""Constants of a machine from measured step times. Torch-free."""

import contextlib
import itertools
import json
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from planner.machine import Constants, Machine

# What a fit may give each constant: parts stay parts.
BOUNDS = {
    "matmul": (0.05, 1.1), "half": (0.1, 20.0), "attention": (0.05, 1.1), "hbm": (0.05, 1.0),
    "link": (0.05, 1.0), "nic": (0.05, 1.0), "host": (1e-4, 0.2), "overlap": (0.05, 1.0),
    "fixed": (1e-3, 1.0),
}  # fmt: skip
# Relative error to which a prediction counts as right.
CLOSE = 0.02
# A sample: seconds predicted with some constants, and those measured.
Sample = tuple[Callable[[Constants], float], float]


def fit(
    samples: Sequence[Sample], start: Constants, names: Sequence[str] = tuple(BOUNDS)
) -> Constants:
    """The constants with the smallest mean |log(predicted / measured)|, by coordinate descent.

    What the samples say little about stays as it was: a small cost of each change sees to that.

    Args:
        names: the constants that may change.
    """

    def cost(c: Constants) -> float:
        errors = [abs(math.log(predict(c) / seconds)) for predict, seconds in samples]
        return statistics.mean(errors) + 0.002 * _change(c, start)

    best, found, step = cost(start), start, 1.3
    while step > 1.01:
        improved = False
        for name in names:
            low, high = BOUNDS[name]
            for factor in (step, 1 / step):
                value = min(high, max(low, getattr(found, name) * factor))
                tried = replace(found, **{name: value})
                if (c := cost(tried)) < best - 1e-6:
                    best, found, improved = c, tried, True
        if not improved:
            step = math.sqrt(step)
    return found


def explanations(samples: Sequence[Sample], start: Constants, count: int) -> list[Constants]:
    """For every ``count`` of the constants that alone can make all predictions right, to CLOSE,
    their values then; the least change first."""
    found = []
    for names in itertools.combinations(BOUNDS, count):
        constants = fit(samples, start, names)
        if all(abs(predict(constants) / seconds - 1) < CLOSE for predict, seconds in samples):
            found.append(constants)
    return sorted(found, key=lambda constants: _change(constants, start))


def _change(constants: Constants, start: Constants) -> float:
    return sum(abs(math.log(getattr(constants, n) / getattr(start, n))) for n in BOUNDS)


def _changes(constants: Constants, start: Constants) -> str:
    pairs = ((name, getattr(start, name), getattr(constants, name)) for name in BOUNDS)
    changed = [
        f"{name} {old:.3g} -> {new:.3g}"
        for name, old, new in pairs
        if not math.isclose(old, new, rel_tol=1e-3)
    ]
    return ", ".join(changed) or "nothing"


def measured_seconds(run: Path, since: float) -> float:
    """Median seconds of a step of a run directory, without the first logged step.

    Args:
        since: time in seconds; what was logged before is of another start, perhaps of another
            layout.

    Raises:
        ValueError: if it has too few.
    """
    rows = []
    with contextlib.suppress(OSError):
        for line in (run / "metrics.jsonl").read_text().splitlines():
            # A run that was killed may have left half a line.
            with contextlib.suppress(ValueError):
                rows.append(json.loads(line))
    rows = [row for row in rows if isinstance(row, dict) and row.get("time", 0) >= since]
    found = [row.get("step_s") for row in rows[1:]]
    seconds = [s for s in found if isinstance(s, int | float) and 0 < s < math.inf]
    if not seconds:
        raise ValueError(f"{run}: metrics.jsonl has no two logged steps: train it for longer")
    return statistics.median(seconds)


def learn(samples: Sequence[Sample], machine: Machine) -> tuple[Machine, list[str], float]:
    """A machine whose constants explain the samples, and what that says.

    The fewest constants are taken that explain all of them, one or two, and of these the least
    change; what would explain them as well is named. If there are none, all are fitted together.

    Returns:
        The machine, lines for a person, and the largest relative error that is left.
    """
    start, lines = machine.constants, []
    for predict, seconds in samples:
        before = predict(start)
        lines.append(
            f"step {seconds:.4g} s, predicted {before:.4g} s ({before / seconds - 1:+.0%})"
        )
    found = explanations(samples, start, 1) or explanations(samples, start, 2)
    constants = found[0] if found else fit(samples, start)
    others = [_changes(other, start) for other in found[1:4]]
    lines.append(f"{'perhaps ' if others else ''}wrong: {_changes(constants, start)}")
    if others:
        lines.append(f"or as well: {'; or '.join(others)}; runs of other layouts would tell")
    errors = [predict(constants) / seconds - 1 for predict, seconds in samples]
    for (_, seconds), error in zip(samples, errors, strict=True):
        lines.append(f"now {(1 + error) * seconds:.4g} s ({error:+.1%})")
    return replace(machine, constants=constants), lines, max(map(abs, errors))
