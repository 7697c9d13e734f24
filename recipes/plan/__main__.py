"""Plan a layout before the GPUs are there: what fits, how fast it is, and what it costs.

    python -m recipes.plan --recipe llama3_70b --gpu h100 --gpus 256

Memory is by the formulas that the tests hold equal to the trainer, time by a table of GPUs, or by
constants measured on a machine (--calibrate, the one option that imports torch for it) or fitted to
runs (--learn). Flags of train_llm.py (--recipe, --seq-len, --global-batch-size,
--compile, model fields, ...) say what is trained; its layout is the one that is compared with. Exit
codes: 0 there is a plan, 1 nothing fits or a check failed, 2 bad input.
"""

import argparse
import contextlib
import math
import os
import sys
from pathlib import Path

from common.errors import ConfigError, LayoutError
from common.output import run_command
from parallel.launch import Launch, read_launch
from parallel.layout import parse_layout
from planner.machine import known_gpus, load_machine
from planner.search import DIMS
from recipes.plan.learn import learn_from
from recipes.plan.planning import KEPT, own_flags, plan
from training.config.checks import check_optimizer
from training.config.command_line import Parser, parse_flags, positive
from training.config.schema import Config
from training.start import bare_launch, check, refuse, with_vocabulary

OBJECTIVE = (
    "the most tokens per second of all GPUs, or the cheapest tokens, on half or a quarter of them "
    "where that is better (default: tokens)"
)
DRY_RUN = "build --layout on one process without memory, and compare with the formulas"
CALIBRATION = (
    "constants of a machine to plan with; --calibrate and --learn write them there, or without it "
    "to calibration.json"
)
CALIBRATE = (
    "measure this machine in about a minute with the shapes of a training, and write its "
    "constants; for collectives under torchrun, with the training's --tp, --cp, --pp, "
    "--dp-replicate"
)


def make_parser() -> Parser:
    """The options of this command; what they do not know is for training."""
    parser = Parser(prog="python -m recipes.plan", description=__doc__)
    gpus = ", ".join(known_gpus())
    for name, placeholder, kind, text in (
        ("--gpu", "NAME", str, f"kind of GPU: {gpus} (default: h100, or that of --calibration)"),
        ("--gpus", "N", positive, "number of GPUs (default: those of --layout, or 8)"),
        ("--have", "N", positive, "GPUs at hand: plan for as many of them as are of use"),
        ("--gpus-per-node", "N", positive, "default: as in the table"),
        ("--nic", "GB/S", above_zero, "of a GPU between nodes (default: as in the table)"),
        ("--price", "USD", above_zero, "of a GPU and hour (default: no costs)"),
        ("--layout", "NAME", str, "your layout, as pp2-dp16-tp8, instead of the recipe's"),
        ("--emit", "FILE.toml", Path, "write the first plan as a recipe"),
        ("--calibration", "FILE", Path, CALIBRATION),
    ):
        parser.add_argument(name, metavar=placeholder, type=kind, help=text)
    add = parser.add_argument
    text = f"plan only with these: {', '.join(KEPT)}"
    add("--keep", nargs="+", default=[], metavar="NAME=VALUE", help=text)
    add("--objective", choices=["tokens", "cost"], default="tokens", help=OBJECTIVE)
    add("--top", type=positive, default=10, metavar="N", help="structures shown (default: 10)")
    add("--memory-only", action="store_true", help="leave out what depends on the GPU's speed")
    add("--dry-run", action="store_true", help=DRY_RUN)
    add("--calibrate", action="store_true", help=CALIBRATE)
    text = "fit the constants to the step times of run directories"
    add("--learn", type=Path, nargs="+", metavar="RUN", help=text)
    return parser


def above_zero(text: str) -> float:
    """A number above 0, for a flag."""
    number = float(text)
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a number above 0")
    return number


def parse_command(argv: list[str]) -> tuple[argparse.Namespace, Config]:
    """The options, and the training to plan, with a vocabulary.

    Raises:
        ConfigError: in one line. SystemExit: with 0, for --help.
    """
    options, train_flags = make_parser().parse_known_args(argv)
    config = with_vocabulary(parse_flags(train_flags, console=bare_launch().rank == 0))
    if error := config.model.architecture_error():
        raise ConfigError(error)
    check_optimizer(config)
    if options.objective == "cost" and options.price is None:
        raise ConfigError("--objective cost needs the --price of a GPU and hour")
    if config.memory.grad_compression != "none" and not options.calibrate:
        raise ConfigError(
            f"--grad-compression {config.memory.grad_compression} is not planned: leave it out"
        )
    if config.layout.world_size:
        raise ConfigError(f"--world-size {config.layout.world_size}: here it is --gpus")
    if options.layout:
        sizes = math.prod(parse_layout(options.layout).values())
        if options.gpus not in (None, sizes) and not options.have:
            raise ConfigError(
                f"--layout {options.layout} is of {sizes} GPUs, and --gpus is {options.gpus}: "
                "leave out one of them"
            )
        options.gpus = sizes
    options.gpus = options.gpus or 8
    return options, config


def calibrate_here(options: argparse.Namespace, config: Config) -> int:
    """``--calibrate``: measure the machine of these ranks, and write its constants."""
    file = options.calibration or Path("calibration.json")
    if options.learn:
        raise ConfigError("--calibrate and --learn both write --calibration: use one of them")
    launch = read_launch()
    if launch.rank == 0 and (file.is_dir() or not os.access(file.parent, os.W_OK)):
        raise ConfigError(f"--calibration {file} cannot be written: name a file in a folder")
    layout = check(config, launch)
    if options.gpu:
        load_machine(options.gpu)
    from recipes.plan.calibrate import calibrate

    calibrate(config, layout, launch, file, options.gpu)
    return 0


def dry_run_of(options: argparse.Namespace, config: Config) -> int:
    """``--dry-run``: 1 if what the trainer builds differs from the formulas."""
    own = own_flags(config, options.layout)
    for name in DIMS:
        setattr(config.layout, name, own[name])
    layout = check(config, Launch(0, options.gpus, 0, options.gpus))
    from recipes.plan.dry_run import dry_run

    return dry_run(config, layout)


def main(argv: list[str] | None = None) -> int:
    """The command; its exit code."""
    try:
        options, config = parse_command(sys.argv[1:] if argv is None else argv)
        if options.calibrate:
            return calibrate_here(options, config)
        if options.learn:
            return learn_from(options)
        if options.dry_run:
            return dry_run_of(options, config)
        return plan(options, config)
    except ConfigError as error:
        launch = bare_launch()
        with contextlib.suppress(LayoutError):
            launch = read_launch()
        if launch.rank:
            # As --calibrate starts them: the first one speaks.
            refuse(str(error), launch, "recipes.plan")
        print(f"recipes.plan: error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    run_command(main, "recipes.plan")
