"""Train the same run on several layouts, and say whether their curves differ by more than rounding.

    python -m recipes.compare_layouts --layouts 1x8 2x4 4x2 8x1 --steps 100 --verdict

One process tree after another: the reference on one process, then each layout with torchrun, in
fresh run directories below --out. Start the same command again to go on after a crash or Ctrl-C.
Exit codes: 0 nothing wrong, 1 a failed run or a bug, 2 bad input, 130 interrupted.
"""

import argparse
from pathlib import Path

from common.errors import ConfigError
from parallel.layout import Layout, layout_flags, parse_layout
from training.config.command_line import Parser, parse_flags, positive

REFERENCE = "1x1"
# Flags that the comparison sets for each run.
SET_PER_RUN = (*layout_flags(REFERENCE)[::2], "--run-dir", "--world-size")
SET_PER_RUN += ("--wandb-name", "--wandb-group")
# Every run of a comparison goes on by itself until its last step.
USELESS = ("--print-plan", "--resume", "--stop-after")
# Flags that change nothing unless the layout has the dim.
USED_WITH = {"--pp-schedule": "pp", "--sequence-parallel": "tp"}

HELP = {
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

    def add(name: str, **settings) -> None:
        parser.add_argument(name, help=HELP[name], **settings)

    parser.add_argument(
        "--help", "-h", action="store_true", help="show this and train_llm.py's flags"
    )
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
    options.layouts = [Layout(**size, batch_size=1, micro_batches=1).name for size in sizes]
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
    given, layouts = {arg.split("=")[0].replace("_", "-") for arg in train_flags}, options.layouts
    batch = ("--batch-size", "--global-batch-size") if options.batch_sizes else ()
    set_here = "is set for each layout: leave it out, and name the --layouts"
    refused = dict.fromkeys((*SET_PER_RUN, *batch), set_here)
    refused |= dict.fromkeys(USELESS, "has no use in a comparison: leave it out")
    for name, reason in refused.items():
        if name in given:
            raise ConfigError(f"{name} {reason}")
    for name, dim in USED_WITH.items():
        if name in given and all(parse_layout(x)[dim] == 1 for x in layouts):
            raise ConfigError(
                f"{name} changes nothing in --layouts {' '.join(layouts)}: leave it out, or name "
                f"one with {dim}"
            )
