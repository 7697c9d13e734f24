"""Constants of a machine from measured step times. Torch-free."""

import contextlib
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
# A sample: seconds predicted with some constants, and those measured.
Sample = tuple[Callable[[Constants], float], float]


def fit(samples: Sequence[Sample], start: Constants) -> Constants:
    """The constants with the smallest mean |log(predicted / measured)|, by coordinate descent.

    What the samples say nothing about stays as it was: a small cost of each change sees to that.
    """

    def cost(c: Constants) -> float:
        errors = [abs(math.log(predict(c) / seconds)) for predict, seconds in samples]
        moved = (math.log(getattr(c, name) / getattr(start, name)) ** 2 for name in BOUNDS)
        return statistics.mean(errors) + 0.002 * sum(moved)

    best, found, step = cost(start), start, 1.3
    while step > 1.01:
        improved = False
        for name, (low, high) in BOUNDS.items():
            for factor in (step, 1 / step):
                value = min(high, max(low, getattr(found, name) * factor))
                tried = replace(found, **{name: value})
                if (c := cost(tried)) < best - 1e-6:
                    best, found, improved = c, tried, True
        if not improved:
            step = math.sqrt(step)
    return found


def explanations(sample: Sample, start: Constants) -> dict[str, float]:
    """For each constant that alone can make a prediction right, its value then, the nearest to what
    it was first."""
    predict, seconds = sample
    found = {}
    for name, (low, high) in BOUNDS.items():

        def gap(value: float, name: str = name) -> float:
            return predict(replace(start, **{name: value})) - seconds

        if gap(low) * gap(high) > 0:
            continue
        for _ in range(60):
            middle = math.sqrt(low * high)
            low, high = (middle, high) if gap(low) * gap(middle) > 0 else (low, middle)
        found[name] = middle
    return dict(sorted(found.items(), key=lambda x: abs(math.log(x[1] / getattr(start, x[0])))))


def measured_seconds(run: Path) -> float:
    """Median seconds of a step of a run directory, without its first logged step.

    Raises:
        ValueError: if it has too few.
    """
    rows = []
    with contextlib.suppress(OSError):
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    seconds = [row["step_s"] for row in rows[1:] if row["step_s"]]
    if not seconds:
        raise ValueError(f"{run}: metrics.jsonl has no two logged steps: train it for longer")
    return statistics.median(seconds)


def learn(samples: Sequence[Sample], machine: Machine) -> tuple[Machine, list[str]]:
    """A machine whose constants explain the samples, and what that says.

    One step time cannot tell constants apart: the one that has to change least is taken, and the
    others that would explain it are named. Several are fitted together.
    """
    start = machine.constants
    lines = []
    for predict, seconds in samples:
        before = predict(start)
        lines.append(
            f"step {seconds:.4g} s, predicted {before:.4g} s ({before / seconds - 1:+.0%})"
        )
    if len(samples) > 1:
        constants = fit(samples, start)
    else:
        found = explanations(samples[0], start)
        constants = replace(start, **dict(list(found.items())[:1]))
        others = ", or ".join(
            f"{n} {getattr(start, n):.3g} -> {v:.3g}" for n, v in list(found.items())[1:]
        )
        if others:
            lines.append(f"one step time cannot tell them apart; as well: {others}")
        if not found:
            constants = fit(samples, start)
    changed = [
        f"{name} {old:.3g} -> {getattr(constants, name):.3g}"
        for name, old in vars(start).items()
        if not math.isclose(old, getattr(constants, name), rel_tol=1e-3)
    ]
    lines.append(f"wrong: {', '.join(changed) or 'nothing'}")
    for predict, seconds in samples:
        lines.append(f"now {predict(constants):.4g} s ({predict(constants) / seconds - 1:+.1%})")
    return replace(machine, constants=constants), lines
