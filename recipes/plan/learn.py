"""Constants of a machine from the step times of runs. Torch-free."""

import argparse
import contextlib
import itertools
import json
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from common.errors import ConfigError
from planner.machine import Constants, Machine, load_machine, table_name, write_calibration
from planner.time import step_time
from recipes.plan.planning import find_machine, make_search, own_flags
from training.config.command_line import load_recipe
from training.config.schema import Config
from training.start import with_vocabulary

# What a fit may give each constant: parts stay parts.
PART = (0.05, 1.0)
BOUNDS = {
    "matmul": (0.05, 1.1),
    "half": (0.1, 20.0),
    "attention": (0.05, 1.1),
    "hbm": PART,
    "link": PART,
    "nic": PART,
    "host": (1e-4, 0.2),
    "overlap": PART,
    "fixed": (1e-3, 1.0),
}
# Relative error to which a prediction counts as right, and the one that is left of a step above
# which constants are not worth a file.
CLOSE, UNEXPLAINED = 0.02, 0.2
# What a change of a constant costs, as a part of the same change of every predicted time.
CHANGE = 0.005
# A sample: seconds predicted with some constants, and those measured.
Sample = tuple[Callable[[Constants], float], float]


def fit(
    samples: Sequence[Sample], start: Constants, names: Sequence[str] = tuple(BOUNDS)
) -> Constants:
    """The constants with about the smallest mean |log(predicted / measured)|.

    What the samples say little about stays about as it was: a small cost of each change sees to
    that.

    Args:
        names: the constants that may change.
    """
    import numpy as np
    from scipy.optimize import least_squares

    low, high = np.array([BOUNDS[name] for name in names]).T
    first = np.clip([getattr(start, name) for name in names], low, high)

    def constants(values: np.ndarray) -> Constants:
        return replace(start, **dict(zip(names, values.tolist(), strict=True)))

    def residuals(values: np.ndarray) -> list[float]:
        tried, weight = constants(values), CHANGE * len(samples)
        errors = [math.log(predict(tried) / seconds) for predict, seconds in samples]
        return errors + [weight * change for change in np.log(values / first)]

    values = first
    # A wide step for slopes first: a host that is fast enough shows in no time at all.
    for step in (0.3, 1e-3):
        options = {"loss": "soft_l1", "f_scale": CLOSE / 2, "diff_step": step, "max_nfev": 60}
        values = least_squares(residuals, values, bounds=(low, high), x_scale=first, **options).x
    return constants(values)


def explanations(samples: Sequence[Sample], start: Constants, count: int) -> list[Constants]:
    """For every ``count`` of the constants that alone can make all predictions right, to CLOSE,
    their values then; the least change first."""
    right = []
    for names in itertools.combinations(BOUNDS, count):
        constants = fit(samples, start, names)
        if all(abs(predict(constants) / seconds - 1) < CLOSE for predict, seconds in samples):
            right.append(constants)
    return sorted(right, key=lambda constants: _change(constants, start))


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
    logged = [row.get("step_s") for row in rows[1:]]
    seconds = [s for s in logged if isinstance(s, int | float) and 0 < s < math.inf]
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
    right = explanations(samples, start, 1) or explanations(samples, start, 2)
    constants = right[0] if right else fit(samples, start)
    others = [_changes(other, start) for other in right[1:4]]
    lines.append(f"{'perhaps ' if others else ''}wrong: {_changes(constants, start)}")
    if others:
        lines.append(f"or as well: {'; or '.join(others)}; runs of other layouts would tell")
    errors = [predict(constants) / seconds - 1 for predict, seconds in samples]
    for (_, seconds), error in zip(samples, errors, strict=True):
        lines.append(f"now {(1 + error) * seconds:.4g} s ({error:+.1%})")
    return replace(machine, constants=constants), lines, max(map(abs, errors))


def read_run(run: Path) -> tuple[Config, int, str, float]:
    """The training of a run directory, its number of ranks, its device, and seconds of a step.

    Raises:
        ConfigError: if the directory does not say them.
    """
    if not (run / "config.toml").is_file():
        raise ConfigError(f"--learn {run} is no run directory: it has no config.toml")
    try:
        config = with_vocabulary(load_recipe(str(run / "config.toml")))
        started = json.loads((run / "run.json").read_text())["starts"][-1]
        world, device = int(started["world_size"]), str(started["device"])
        return config, world, device, measured_seconds(run, started["time"])
    except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
        raise ConfigError(f"--learn {run}: {error}") from None


def learning_machine(options: argparse.Namespace, device: str) -> Machine:
    """The machine whose constants are changed to explain runs on ``device``.

    Raises:
        ConfigError: if nothing is known of the device.
    """
    if options.calibration and options.calibration.is_file():
        return load_machine(options.gpu or "", options.calibration)
    options.gpu = options.gpu or table_name(device)
    if not options.gpu:
        raise ConfigError(
            f"--learn {options.learn[0]}: it ran on {device}, which is not in the table of GPUs: "
            "name one with --gpu, or give --calibration FILE of what --calibrate has measured"
        )
    return find_machine(options)


def _sample(machine: Machine, config: Config, world: int, device: str, seconds: float) -> Sample:
    search = make_search(config, machine, cuda=device != "cpu")
    mine = search.at(world, own_flags(config, None))
    stages = search.stages(mine.layout)

    def predict(constants: Constants) -> float:
        changed = replace(machine, constants=constants)
        return step_time(search.model, mine.layout, mine.options, changed, stages).total

    return predict, seconds


def learn_from(options: argparse.Namespace) -> int:
    """``--learn``: fit the constants to runs, say which were wrong, and write them."""
    runs = [read_run(run) for run in options.learn]
    if len(devices := {device for _, _, device, _ in runs}) > 1:
        raise ConfigError(
            f"--learn: runs on {' and '.join(sorted(devices))}: learn from each alone"
        )
    machine = learning_machine(options, runs[0][2])
    machine, lines, worst = learn([_sample(machine, *run) for run in runs], machine)
    print("\n".join(lines))
    if worst > UNEXPLAINED:
        print("no constants within their bounds explain that: nothing is written")
        return 1
    file, config = options.calibration or Path("calibration.json"), runs[-1][0]
    learnt = replace(
        machine,
        source=f"learnt from {', '.join(map(str, options.learn))}",
        compiled=config.memory.compile,
        dtype=config.step.dtype,
        learnt=True,
    )
    write_calibration(file, learnt)
    print(f"written: {file}")
    return 0
