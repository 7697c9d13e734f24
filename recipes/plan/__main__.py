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
import itertools
import json
import math
import os
import sys
from dataclasses import replace
from pathlib import Path

from common.errors import ConfigError, LayoutError
from common.files import write_atomic
from common.output import run_command
from parallel.launch import Launch, read_launch
from parallel.layout import parse_layout
from planner.machine import Machine, known_gpus, load_machine, table_name, write_calibration
from planner.memory import memory_options
from planner.report import Report
from planner.search import DIMS, TIE, Plan, Search
from planner.time import step_time
from recipes.plan.learn import learn, measured_seconds
from training.config.checks import check_optimizer
from training.config.command_line import Parser, load_recipe, parse_flags, positive
from training.config.schema import Config, to_toml
from training.start import bare_launch, check, refuse

# Relative error that is left of a step, above which constants are not worth a file.
UNEXPLAINED = 0.2
# Of --have: most ranks among which a replica is cut, and numbers of GPUs that are tried.
MODEL_RANKS, COUNTS_TRIED = 128, 12
KEPT = (*DIMS, "zero", "pp_schedule", "micro_batch_size", "activation_checkpoint", "loss_chunks")


def make_parser() -> Parser:
    """The options of this command; what they do not know is for training."""
    parser = Parser(prog="python -m recipes.plan", description=__doc__)
    add = parser.add_argument
    add("--gpu", metavar="NAME", help=f"kind of GPU: {', '.join(known_gpus())} (default: h100, or "
        "that of --calibration)")  # fmt: skip
    add("--gpus", type=positive, metavar="N", help="number of GPUs (default: those of --layout, or "
        "8)")  # fmt: skip
    add("--have", type=positive, metavar="N",
        help="GPUs that are left: plan for as many of them as are of use")  # fmt: skip
    add("--gpus-per-node", type=positive, metavar="N", help="default: as in the table")
    add("--nic", type=above_zero, metavar="GB/S",
        help="network bandwidth of a GPU between nodes (default: as in the table)")  # fmt: skip
    add("--price", type=above_zero, metavar="USD", help="of a GPU and hour (default: no costs)")
    add("--objective", choices=["tokens", "cost"], default="tokens",
        help="the most tokens per second of all GPUs, or the cheapest tokens, on half or a quarter "
        "of them where that is better (default: tokens)")  # fmt: skip
    add("--keep", nargs="+", default=[], metavar="NAME=VALUE",
        help=f"plan only with these: {', '.join(KEPT)}")  # fmt: skip
    add("--layout", metavar="NAME",
        help="your layout, as pp2-dp16-tp8, instead of the recipe's")  # fmt: skip
    add("--memory-only", action="store_true", help="leave out what depends on the GPU's speed")
    add("--top", type=positive, default=10, metavar="N", help="structures shown (default: 10)")
    add("--emit", type=Path, metavar="FILE.toml", help="write the first plan as a recipe")
    add(
        "--dry-run",
        action="store_true",
        help="build --layout on one process without memory, and compare with the formulas",
    )
    add("--calibration", type=Path, metavar="FILE",
        help="constants of a machine to plan with; --calibrate and --learn write them there, or "
        "without it to calibration.json")  # fmt: skip
    add("--calibrate", action="store_true",
        help="measure this machine in about a minute with the shapes of a training, and write its "
        "constants; for collectives under torchrun, with the training's --tp, --cp, --pp, "
        "--dp-replicate")  # fmt: skip
    add("--learn", type=Path, nargs="+", metavar="RUN",
        help="fit the constants to the step times of run directories")  # fmt: skip
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


def with_vocabulary(config: Config) -> Config:
    """With the vocabulary of its tokenizer, if none is set."""
    if config.model.vocab_size is None:
        from training.data.tokenizer import load_tokenizer

        config.model.vocab_size = load_tokenizer(config.data.tokenizer).vocab_size
    return config


def parse_kept(words: list[str]) -> dict:
    """``--keep`` as sizes and settings by name.

    Raises:
        ConfigError: for an unknown name, or a value that is none.
    """
    kept = {}
    for word in words:
        name, _, value = word.partition("=")
        name = name.replace("-", "_")
        if name not in KEPT or not value:
            raise ConfigError(f"--keep {word} is not NAME=VALUE of one of {', '.join(KEPT)}")
        if name not in ("pp_schedule", "activation_checkpoint"):
            if not value.isdecimal() or (int(value) < 1 and name != "zero"):
                raise ConfigError(f"--keep {word}: {value!r} is not a whole number above 0")
            value = int(value)
        kept[name] = value
    # The recipe's own schema says which words and ZeRO stages there are.
    sections = load_recipe("debug")
    for section in (sections.layout, sections.memory):
        known = {k: v for k, v in kept.items() if k in type(section).model_fields}
        type(section)(**known)
    return kept


def own_flags(config: Config, layout: str | None) -> dict:
    """The layout of a training, or of the name, and its settings: of :meth:`Search.at`."""
    flags = config.layout.model_dump(include={*DIMS, "zero", "pp_schedule"})
    if layout:
        sizes = parse_layout(layout)
        flags |= {name: sizes[name] for name in DIMS}
    memory = config.memory.model_dump(include={"activation_checkpoint", "loss_chunks"})
    return {**flags, **memory, "micro_batch_size": config.step.micro_batch_size}


def find_machine(options: argparse.Namespace) -> Machine:
    """The machine that is planned for."""
    known = {"node": options.gpus_per_node, "nic_gbs": options.nic}
    calibration = None if options.learn else options.calibration
    gpu = options.gpu or ("" if calibration else "h100")
    return load_machine(gpu, calibration, **{k: v for k, v in known.items() if v})


def make_search(config: Config, machine: Machine, cuda: bool | None = None) -> Search:
    """The layouts of a training on a machine, by default on CUDA unless that is a CPU."""
    options = memory_options(config, machine.name != "cpu" if cuda is None else cuda)
    size, setting = config.step.global_batch_size, config.layout.sequence_parallel
    return Search(config.model, machine, options, size, setting)


def emit(config: Config, plan: Plan, search: Search, file: Path) -> None:
    """Write the training with the layout of a plan as a recipe.

    Raises:
        ConfigError: if it cannot be written, or is none by name.
    """
    if file.suffix != ".toml":
        raise ConfigError(f"--emit {file}: name a file that ends in .toml")
    config, x, o = config.model_copy(deep=True), plan.layout, plan.options
    for name in (*DIMS, "zero", "pp_schedule"):
        setattr(config.layout, name, getattr(x, name))
    config.memory.activation_checkpoint = o.activation_checkpoint
    config.memory.loss_chunks = o.loss_chunks
    config.step.micro_batch_size = x.micro_batch_size
    gpus, machine = x.world_size, search.machine
    head = (
        f"# Planned by recipes.plan: {x.name} on {gpus} x {machine.name}, {plan.gib:.1f} of "
        f"{machine.usable_gib:.1f} GiB by formula (P(oom) {search.risk(plan):.0%})"
    )
    try:
        write_atomic(file, f"{head}\n\n{to_toml(config)}")
    except OSError as error:
        raise ConfigError(f"--emit {file} cannot be written: {error.strerror}") from None
    nodes, each = max(1, gpus // machine.node), min(gpus, machine.node)
    several = f"--nnodes {nodes} --rdzv-backend c10d --rdzv-endpoint HOST:29500 "
    ranks = f"{several if nodes > 1 else ''}--nproc-per-node {each}"
    print(f"written: {file}\nstart: torchrun {ranks} train_llm.py --recipe {file}")


def candidates(options: argparse.Namespace, node: int, global_batch_size: int) -> list[int]:
    """Numbers of GPUs to plan for, the most useful first."""
    if options.have:
        whole = options.have // node * node
        counts = range(whole, 0, -node) if whole else range(options.have, 0, -1)
        # The dp ranks share out the global batch, the other dims what is left of the GPUs.
        useful = (n for n in counts if n // math.gcd(n, global_batch_size) <= MODEL_RANKS)
        return list(itertools.islice(useful, COUNTS_TRIED)) or [counts[-1]]
    counts = [options.gpus, options.gpus // 2, options.gpus // 4]
    return [n for n in counts if n] if options.objective == "cost" else counts[:1]


def find_plans(options, config: Config, machine: Machine, keep: dict) -> tuple[Search, list[Plan]]:
    """The plans of the best number of GPUs, the best first."""
    best = None
    for gpus in candidates(options, machine.node, config.step.global_batch_size):
        search = make_search(config, machine)
        plans = search.all(gpus, keep, timed=not options.memory_only)
        if best is None or (plans and not best[1]):
            best = search, plans
        elif plans and not options.memory_only:
            report = Report(search, options.price)
            now, then = (report.speed(x[0]) * x[0].layout.world_size for x in (plans, best[1]))
            if options.objective == "cost":
                now, then = -report.cost(plans[0]), -report.cost(best[1][0])
            # Half the GPUs for a tie are twice the days.
            if now > (then if options.have else then + TIE * abs(then)):
                best = search, plans
        # Fewer GPUs would have to be more than a tenth faster each.
        if (
            options.have
            and best[1]
            and (options.memory_only or gpus < 0.9 * best[1][0].layout.world_size)
        ):
            break
    return best


def explain(report: Report, plans: list[Plan], own: dict, gpus: int, whose: str) -> list[str]:
    """Why the first plan is first, and the layout ``own`` is not."""
    search, lines = report.search, []
    if plans:
        others = [p for p in plans if p.structure != plans[0].structure]
        lines += report.items(plans[0])
        if others and plans[0].time:
            lines.append(report.compare(plans[0], others[0], "the next structure"))
    try:
        mine = search.at(gpus, own)
    except LayoutError as error:
        return [*lines, f"{whose} cannot be built: {error}"]
    fits = search.fits(mine)
    if (plans and plans[0].time) or not fits:
        lines.append(report.compare(plans[0] if plans else mine, mine, whose))
    if not fits:
        lines += report.items(mine)[:-1] + report.suggestions(own, mine)
    return lines


def other_ways(machine: Machine, config: Config) -> list[str]:
    """In what constants were measured that the training does not do."""
    found = []
    if not machine.source and config.step.dtype != "bfloat16":
        return [f"not validated: times in {config.step.dtype}: the table's are of bfloat16"]
    if machine.dtype not in (None, config.step.dtype):
        found.append(f"in {machine.dtype}, and this is {config.step.dtype}")
    if machine.compiled not in (None, config.memory.compile):
        ways = ("with", "without") if machine.compiled else ("without", "with")
        found.append(f"{ways[0]} --compile, and this is {ways[1]}")
    return [f"measured {way}: calibrate with the training's flags" for way in found]


def plan(options: argparse.Namespace, config: Config) -> int:
    """Print the plans; 1 if nothing fits."""
    machine, keep = find_machine(options), parse_kept(options.keep)
    ranks = math.prod(keep.get(dim, 1) for dim in DIMS)
    if not options.have and options.gpus % ranks:
        raise ConfigError(
            f"--keep {' '.join(options.keep)}: {ranks} does not divide the {options.gpus} GPUs"
        )
    search, plans = find_plans(options, config, machine, keep)
    gpus = plans[0].layout.world_size if plans else options.have or options.gpus
    report = Report(search, options.price)
    own = own_flags(config, options.layout)
    print(f"{gpus} x {machine.name}, {machine.node} to a node | {report.head(len(plans))}\n")
    print("\n".join([*report.table(plans, options.top), ""]))
    if not plans:
        kept = f", with --keep {' '.join(options.keep)}" if options.keep else ""
        size = search.global_batch_size
        print(f"nothing fits {gpus} of them with --global-batch-size {size}{kept}\n")
    whose = "your layout" if options.layout else "the layout of the recipe and flags"
    print("\n".join([*explain(report, plans, own, gpus, whose), "", *report.rejected()]))
    shown = plans[: options.top]
    for line in [*report.warnings(shown), *other_ways(machine, config)] if plans else []:
        print(line)
    if plans and options.emit:
        emit(config, plans[0], search, options.emit)
    return 0 if plans else 1


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
    """What the constants of a run on ``device`` are learnt from.

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


def learn_from(options: argparse.Namespace) -> int:
    """``--learn``: fit the constants to runs, say which were wrong, and write them."""
    runs = [read_run(run) for run in options.learn]
    if len(devices := {device for _, _, device, _ in runs}) > 1:
        raise ConfigError(
            f"--learn: runs on {' and '.join(sorted(devices))}: learn from each alone"
        )
    machine, samples = learning_machine(options, runs[0][2]), []
    for config, world, device, seconds in runs:
        search = make_search(config, machine, cuda=device != "cpu")
        mine = search.at(world, own_flags(config, None))

        def predict(constants, search=search, mine=mine) -> float:
            changed = replace(machine, constants=constants)
            stages = search.stages(mine.layout)
            return step_time(search.model, mine.layout, mine.options, changed, stages).total

        samples.append((predict, seconds))
    machine, lines, worst = learn(samples, machine)
    print("\n".join(lines))
    if worst > UNEXPLAINED:
        print("no constants within their bounds explain that: nothing is written")
        return 1
    file = options.calibration or Path("calibration.json")
    learnt = f"learnt from {', '.join(map(str, options.learn))}"
    memory, step = config.memory, config.step
    known = {"compiled": memory.compile, "dtype": step.dtype, "learnt": True}
    write_calibration(file, replace(machine, source=learnt, **known))
    print(f"written: {file}")
    return 0


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
