"""The best layouts for a training on a machine, and why they are that. Torch-free."""

import argparse
import itertools
import math
from pathlib import Path

from common.errors import ConfigError, LayoutError
from common.files import write_atomic
from parallel.layout import parse_layout
from planner.machine import Machine, load_machine
from planner.report import Report
from planner.search import DIMS, TIE, Plan, Search
from training.config.command_line import load_recipe
from training.config.options import planner_options, to_toml
from training.config.schema import Config

# Of --have: most ranks that one replica of the model may have, and numbers of GPUs that are tried.
MODEL_RANKS, COUNTS_TRIED = 128, 12
OLDER = {"batch_size": "micro_batch_size"}
KEPT = (*DIMS, "zero", "pp_schedule", "micro_batch_size", "activation_checkpoint", "loss_chunks")


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
    changes = {"node": options.gpus_per_node, "nic_gbs": options.nic}
    calibration = None if options.learn else options.calibration
    gpu = options.gpu or ("" if calibration else "h100")
    return load_machine(gpu, calibration, **{k: v for k, v in changes.items() if v})


def make_search(config: Config, machine: Machine, cuda: bool | None = None) -> Search:
    """The layouts of a training on a machine, by default on CUDA unless that is a CPU."""
    options = planner_options(config, machine.name != "cpu" if cuda is None else cuda)
    size, setting = config.step.global_batch_size, config.layout.sequence_parallel
    return Search(config.model, machine, options, size, setting)


def parse_kept(words: list[str]) -> dict:
    """``--keep`` as sizes and settings by name.

    Raises:
        ConfigError: for an unknown name, or a value that is none.
    """
    kept = {}
    for word in words:
        name, _, value = word.partition("=")
        name = name.replace("-", "_")
        name = OLDER.get(name, name)
        if name not in KEPT or not value:
            raise ConfigError(f"--keep {word} is not NAME=VALUE of one of {', '.join(KEPT)}")
        if name not in ("pp_schedule", "activation_checkpoint"):
            if not value.isdecimal() or (int(value) < 1 and name != "zero"):
                raise ConfigError(f"--keep {word}: {value!r} is not a whole number above 0")
            value = int(value)
        kept[name] = value
    # The schema says which words and ZeRO stages there are.
    sections = load_recipe("debug")
    for section in (sections.layout, sections.memory):
        stated = {k: v for k, v in kept.items() if k in type(section).model_fields}
        for name, value in vars(type(section)(**stated)).items():
            # What the schema takes for another, as of older runs.
            if stated.get(name, value) != value:
                raise ConfigError(f"--keep {name}={stated[name]} is gone: use {name}={value}")
    return kept


def candidates(options: argparse.Namespace, node: int, global_batch_size: int) -> list[int]:
    """Numbers of GPUs to plan for, the most useful first."""
    if options.have:
        whole = options.have // node * node
        counts = range(whole, 0, -node) if whole else range(options.have, 0, -1)
        # dp divides the global batch size; the other dims share the remaining factor of the GPUs.
        useful = (n for n in counts if n // math.gcd(n, global_batch_size) <= MODEL_RANKS)
        return list(itertools.islice(useful, COUNTS_TRIED)) or [counts[-1]]
    counts = [options.gpus, options.gpus // 2, options.gpus // 4]
    return [n for n in counts if n] if options.objective == "cost" else counts[:1]


def find_plans(
    options: argparse.Namespace, config: Config, machine: Machine, keep: dict
) -> tuple[Search, list[Plan]]:
    """The plans of the best number of GPUs, the best first."""
    best = None
    for gpus in candidates(options, machine.node, config.step.global_batch_size):
        search = make_search(config, machine)
        plans = search.all(gpus, keep, timed=not options.memory_only)
        if best is None or (plans and (not best[1] or _better(options, search, plans, best[1]))):
            best = search, plans
        # Fewer GPUs would have to be more than a tenth faster each.
        enough = best[1] and gpus < 0.9 * best[1][0].layout.world_size
        if options.have and best[1] and (options.memory_only or enough):
            break
    return best


def _better(options: argparse.Namespace, search: Search, plans: list[Plan], best: list) -> bool:
    """Whether the first of ``plans``, on fewer GPUs, is better than the first of ``best``."""
    if options.memory_only:
        return False
    report = Report(search, options.price)
    if options.objective == "cost":
        now, then = (-report.cost(x[0]) for x in (plans, best))
    else:
        now, then = (report.speed(x[0]) * x[0].layout.world_size for x in (plans, best))
    # Half the GPUs for a tie are twice the days.
    return now > (then if options.have else then + TIE * abs(then))


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


def measured_otherwise(machine: Machine, config: Config) -> list[str]:
    """What of the training is not as it was when the constants were measured."""
    if not machine.source and config.step.dtype != "bfloat16":
        return [f"not validated: times in {config.step.dtype}: the table's are of bfloat16"]
    ways = []
    if machine.dtype not in (None, config.step.dtype):
        ways.append(f"in {machine.dtype}, and this is {config.step.dtype}")
    if machine.compiled not in (None, config.memory.compile):
        then, now = ("with", "without") if machine.compiled else ("without", "with")
        ways.append(f"{then} --compile, and this is {now}")
    return [f"measured {way}: calibrate with the training's flags" for way in ways]


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
    if plans:
        shown = plans[: options.top]
        print("\n".join([*report.warnings(shown), *measured_otherwise(machine, config)]))
        if options.emit:
            emit(config, plans[0], search, options.emit)
    return 0 if plans else 1
