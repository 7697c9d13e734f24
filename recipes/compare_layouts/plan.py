"""Which runs a comparison trains, checked before the first one starts."""

import argparse
import json
import math
import tempfile
from pathlib import Path

from common.errors import ConfigError
from common.files import write_atomic
from parallel.launch import Launch
from parallel.layout import POWERSGD_START, layout_flags, parse_layout
from recipes.compare_layouts.options import SET_PER_RUN, USELESS
from recipes.compare_layouts.runs import PlannedRun
from training.config.command_line import parse_flags
from training.config.schema import Config, flag
from training.start import check_ahead

# Flags that change nothing that is compared; they, and those of wandb, may differ when a
# comparison goes on.
FREE = {"--comm-timeout", *SET_PER_RUN, *USELESS}


def plan_runs(
    options: argparse.Namespace, train_flags: list[str]
) -> tuple[Config, list[PlannedRun], list[PlannedRun]]:
    """The common config, the runs of the curves and those of the verdict; all of them checked.

    Sets ``options.out`` where it is not given.

    Raises:
        ConfigError: in one line, naming the layout. SystemExit: with 0, for --help.
    """
    # A curve has a point at every step unless the user says otherwise.
    common = ["--log-every", "1", *train_flags]
    base = parse_flags(common)
    options.out = options.out or Path("runs") / f"compare-{Path(base.recipe).stem}"
    if options.verdict:
        _check_verdict(options, base.memory.grad_compression)
    curves = []
    for i, name in enumerate(options.layouts):
        flags = list(common)
        if options.batch_sizes:
            size, sizes = options.batch_sizes[i], parse_layout(name)
            whole = size * sizes["dp_replicate"] * sizes["dp"]
            flags += ["--batch-size", str(size), "--global-batch-size", str(whole)]
        flags += ["--wandb", options.wandb]
        curves.append(_plan_run(name, options.out, options.out, flags))
    if not options.verdict:
        return base, curves, []
    n = str(options.verdict_steps)
    flags = ["--dtype", "float64", "--steps", n, "--fingerprint-steps", n, "--log-every", "1"]
    flags += ["--lr-decay-steps", str(base.optimizer.lr_decay_steps or base.step.steps)]
    flags += ["--eval-every", "0", "--checkpoint-every", "0", "--wandb", "disabled"]
    float64 = [
        _plan_run(name, options.out / "float64", options.out, [*common, *flags])
        for name in options.layouts
    ]
    return base, curves, float64


def _plan_run(layout: str, folder: Path, out: Path, flags: list[str]) -> PlannedRun:
    """A checked run of a layout in ``folder``, named by its path below ``out``."""
    try:
        world_size, run_dir = math.prod(parse_layout(layout).values()), folder / layout
        flags = [*flags, "--run-dir", str(run_dir), *layout_flags(layout)]
        config = parse_flags(flags, console=False)
        check_ahead(config, Launch(0, world_size, 0, world_size))
    except ConfigError as error:
        raise ConfigError(f"layout {layout}: {error}") from None
    return PlannedRun(str(run_dir.relative_to(out)), run_dir, world_size, flags, config)


def _check_verdict(options: argparse.Namespace, compression: str) -> None:
    if compression != "none" and options.no_reference:
        raise ConfigError(
            f"--verdict compares --grad-compression {compression} with one process, which "
            "loses nothing: leave out --no-reference"
        )
    if compression == "powersgd" and options.verdict_steps <= POWERSGD_START:
        raise ConfigError(
            f"--verdict-steps {options.verdict_steps} end before powersgd begins to compress, "
            f"after step {POWERSGD_START}: use --verdict-steps {POWERSGD_START + 1}"
        )


def make_folder(out: Path) -> None:
    """Make the comparison directory.

    Raises:
        ConfigError: if it cannot be written to.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        raise ConfigError(f"--out {out} is not writable ({error.strerror})") from None


def record_flags(
    options: argparse.Namespace, train_flags: list[str], base: Config, runs: list[PlannedRun]
) -> None:
    """Record the flags of this comparison, or refuse to go on with another one in its directory.

    Raises:
        ConfigError: in one line, naming what differs.
    """
    out, file = options.out, options.out / "comparison_flags.json"
    new = {"--recipe": base.recipe, "--init-from": base.init_from and str(base.init_from)}
    for section in base.model_dump(mode="json").values():
        if isinstance(section, dict):
            new |= {flag(key): value for key, value in section.items()}
    new = {k: value for k, value in new.items() if k not in FREE and not k.startswith("--wandb")}
    sizes = options.batch_sizes or [None] * len(options.layouts)
    for name, size in zip(options.layouts, sizes, strict=True):
        new[f"--batch-sizes of {name}"] = size
    if options.verdict:
        new["--verdict-steps"] = options.verdict_steps
    old = {}
    if file.exists():
        try:
            old = dict(json.loads(file.read_text("utf-8"))["resolved"])
        except (OSError, ValueError, KeyError, TypeError):
            raise ConfigError(f"{file} cannot be read: use another --out") from None
    elif foreign := [run.run_dir for run in runs if run.run_dir.exists()]:
        raise ConfigError(f"{foreign[0]} is not of a comparison: use another --out")
    for key, value in new.items():
        if key in old and old[key] != value:
            raise ConfigError(
                f"{key} {value} differs from the {old[key]} of the comparison in {out}: "
                "use the same flags, or another --out"
            )
    make_folder(out)
    record = {"flags": train_flags, "resolved": old | new}
    write_atomic(file, json.dumps(record, indent=1) + "\n")
