"""Train the same run on several layouts, and say whether their curves differ by more than rounding.

    python -m recipes.compare_layouts --layouts 1x8 2x4 4x2 8x1 --steps 100 --verdict

One process tree after another: the reference on one process, then each layout with torchrun, in
fresh run directories below --out. Start the same command again to go on after a crash or Ctrl-C.
Exit codes: 0 nothing wrong, 1 a failed run or a bug, 2 bad input, 130 interrupted.
"""

import argparse
import json
import math
import tempfile
from pathlib import Path

from common.errors import ConfigError
from common.files import write_atomic
from parallel.launch import Launch
from parallel.layout import POWERSGD_START, Layout, layout_flags, parse_layout
from recipes.compare_layouts.runs import PlannedRun
from training.config.command_line import Parser, parse_flags, positive
from training.config.schema import Config, flag
from training.start import check_ahead

REFERENCE = "1x1"
# Flags that the comparison sets for each run.
SET_PER_RUN = (*layout_flags(REFERENCE)[::2], "--run-dir", "--world-size")
SET_PER_RUN += ("--wandb-name", "--wandb-group")
# Every run of a comparison goes on by itself until its last step.
USELESS = ("--print-plan", "--resume", "--stop-after")
# Flags that change nothing that is compared; they, and those of wandb, may differ when a
# comparison goes on.
FREE = {"--comm-timeout", *SET_PER_RUN, *USELESS}
# Flags that change nothing unless the layout has the dim.
USED_WITH = {"--pp-schedule": "pp", "--sequence-parallel": "tp"}
HELP = {
    "--help": "show this and train_llm.py's flags",
    "--layouts": "dp x tp each, on dp*tp processes, or with more dims as rep2-dp2-cp2-tp1 "
    "(default: 1x8 2x4 4x2 8x1)",
    "--no-reference": "do not train on one process: the first layout is the reference",
    "--verdict": "train the first steps again in float64, where rounding vanishes and a bug stays; "
    "name where a bug begins, and exit with 1",
    "--verdict-steps": "steps of --verdict (default: 3)",
    "--batch-sizes": "sequences per dp rank for each layout, so that global batches differ: no "
    "reference, no deviations, loss over steps and over tokens",
    "--out": "comparison directory (default: runs/compare-<recipe>)",
    "--collect": "train nothing: table and picture of these finished run directories of "
    "train_llm.py, or of those in --out",
    "--wandb": "as in train_llm.py, for the curves and one run more with table and picture; all in "
    "one group, named after --out (default: disabled)",
    "--launcher": "what starts the ranks (default: torchrun)",
}


def parse_command(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """The comparison's own options, and the flags that are passed to train_llm.py.

    Raises:
        ConfigError: in one line. SystemExit: with 0, for --help.
    """
    parser = Parser(
        prog="python -m recipes.compare_layouts",
        usage="%(prog)s [option ...] [any train_llm flag ...]",
        description=__doc__,
        add_help=False,
    )

    def add(name: str, *short: str, **settings) -> None:
        parser.add_argument(name, *short, help=HELP[name], **settings)

    add("--help", "-h", action="store_true")
    add("--layouts", nargs="+", metavar="DPxTP")
    add("--no-reference", action="store_true")
    add("--verdict", action="store_true")
    add("--verdict-steps", type=positive, default=3, metavar="N")
    add("--batch-sizes", nargs="+", type=positive, metavar="B")
    add("--out", type=Path, metavar="DIR")
    add("--collect", nargs="*", type=Path, metavar="RUN")
    add("--wandb", choices=("auto", "online", "offline", "disabled"), default="disabled")
    add("--launcher", choices=("torchrun",), default="torchrun")
    options, train_flags = parser.parse_known_args(argv)
    if options.help:
        parser.print_help()
        excluded = ", ".join(SET_PER_RUN + USELESS)
        print(f"\nFlags of train_llm.py, all of which may be given but {excluded}:\n")
        parse_flags([*train_flags, "--help"])
    if options.collect is not None:
        _check_collect(options, train_flags)
    else:
        _complete_layouts(options)
        _check_train_flags(options, train_flags)
    return options, train_flags


def _check_collect(options: argparse.Namespace, train_flags: list[str]) -> None:
    if options.layouts or options.batch_sizes or train_flags:
        extra = "--layouts" if options.layouts else (train_flags or ["--batch-sizes"])[0]
        raise ConfigError(f"--collect trains nothing: leave out {extra}")
    if not options.collect and not options.out:
        raise ConfigError("--collect needs run directories, or the --out of a comparison")
    if options.collect and options.verdict:
        raise ConfigError("--collect RUN judges nothing: name the --out of a --verdict instead")


def _complete_layouts(options: argparse.Namespace) -> None:
    """Put the layouts that are trained into ``options.layouts``, the reference first."""
    sizes = [parse_layout(name) for name in options.layouts or ("1x8", "2x4", "4x2", "8x1")]
    # Named as a run names them: dp2-tp4 is 2x4.
    options.layouts = [Layout(**size, micro_batch_size=1, micro_batches=1).name for size in sizes]
    if repeated := [x for x in options.layouts if options.layouts.count(x) > 1]:
        raise ConfigError(f"--layouts has {repeated[0]} more than once")
    if options.batch_sizes:
        if len(options.batch_sizes) != len(options.layouts):
            raise ConfigError(
                f"--batch-sizes has {len(options.batch_sizes)} values for "
                f"{len(options.layouts)} layouts: give one each"
            )
        if options.verdict:
            raise ConfigError("--verdict needs one global batch: leave out --batch-sizes")
    elif not options.no_reference:
        options.layouts = [REFERENCE] + [x for x in options.layouts if x != REFERENCE]
    if options.verdict and len(options.layouts) < 2:
        raise ConfigError(f"--verdict compares layouts, and there is only {options.layouts[0]}")


def _check_train_flags(options: argparse.Namespace, train_flags: list[str]) -> None:
    layouts = " ".join(options.layouts)
    batch = ("--micro-batch-size", "--global-batch-size") if options.batch_sizes else ()
    set_here = "is set for each layout: leave it out, and name the --layouts"
    refused = dict.fromkeys((*SET_PER_RUN, *batch), set_here)
    refused |= dict.fromkeys(USELESS, "has no use in a comparison: leave it out")
    for name, dim in USED_WITH.items():
        if all(parse_layout(layout)[dim] == 1 for layout in options.layouts):
            refused[name] = (
                f"changes nothing in --layouts {layouts}: leave it out, or name one with {dim}"
            )
    given = {arg.split("=")[0].replace("_", "-") for arg in train_flags}
    for name, reason in refused.items():
        if name in given:
            raise ConfigError(f"{name} {reason}")


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
            flags += ["--micro-batch-size", str(size), "--global-batch-size", str(whole)]
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
