"""Train the same run on several layouts, and say whether their curves differ by more than rounding.

    python -m recipes.compare_layouts --layouts 1x8 2x4 4x2 8x1 --steps 100 --verdict

One process tree after another: the reference on one process, then each layout with torchrun, in
fresh run directories below --out. Start the same command again to go on after a crash or Ctrl-C.
Exit codes: 0 nothing wrong, 1 a failed run or a bug, 2 bad input, 130 interrupted.
"""

import argparse
import contextlib
import dataclasses
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from common.errors import ConfigError, LayoutError
from common.files import REPO, write_atomic
from common.output import run_command
from common.text import printable
from parallel.launch import Launch
from parallel.layout import POWERSGD_START, Layout, layout_flags, parse_layout
from recipes.compare_layouts.differences import differing_flags, named, statement
from recipes.compare_layouts.report import (
    Run,
    build_comparison,
    draw,
    log_to_wandb,
    lossy,
    print_table,
    read_run,
    steps_done,
)
from training.config.command_line import Parser, parse_flags, positive
from training.config.schema import Config, flag
from training.run.directory import RunDir
from training.start import check_ahead

TRAIN = REPO / "train_llm.py"
LAYOUTS = ["1x8", "2x4", "4x2", "8x1"]
REFERENCE = "1x1"
LAYOUT_FLAGS = tuple(layout_flags(REFERENCE)[::2])
# Set here for each run.
OURS = (*LAYOUT_FLAGS, "--run-dir", "--world-size", "--wandb-name", "--wandb-group")
# A comparison has no use for them: every run goes on by itself until its last step.
USELESS = ("--print-plan", "--resume", "--stop-after")
# They change nothing that is compared, and may differ when a comparison goes on; so may those of
# wandb.
FREE = {"--comm-timeout", *OURS, *USELESS}
# What no run uses without a layout of that dim.
USED_WITH = {"--pp-schedule": "pp", "--sequence-parallel": "tp"}
LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
REFUSAL = "train_llm.py: error: "
# Where torchrun begins to say that a process has ended, after all of them have.
TORCHRUN_REPORT = re.compile(r"E\d{4} .*torch/distributed/elastic/.*failed \(exitcode: ")
LOG_TAIL = 20  # lines of a failed run's log that are shown
# Seconds for a run to save and end. torchrun kills its ranks after 30 by itself; killed earlier, it
# would leave them behind.
GRACE_S = 60.0
POLL_S = 0.3
SAY_EVERY_S = 30.0  # a line about the step of the current run, where there is no terminal


class RunFailedError(Exception):
    """A training run ended without finishing; the message has the last lines of its log."""


@dataclass(frozen=True)
class PlannedRun:
    """One training run: ``name`` is its directory below --out, ``flags`` those of train_llm.py."""

    name: str
    run_dir: Path
    processes: int
    flags: list[str]
    config: Config

    @property
    def log(self) -> Path:
        """What the run prints."""
        return self.run_dir.with_name(self.run_dir.name + ".log")

    @property
    def command(self) -> list[str]:
        """The command line; one process needs no launcher."""
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
        launcher = [*torchrun, str(self.processes)] if self.processes > 1 else []
        return [sys.executable, *launcher, str(TRAIN), *self.flags]


def parse_command(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Our own options, and the flags that are passed to train_llm.py.

    Raises:
        ConfigError: in one line. SystemExit: with 0, for --help.
    """
    parser = Parser(
        prog="python -m recipes.compare_layouts",
        usage="%(prog)s [option ...] [any train_llm flag ...]",
        description=__doc__,
        add_help=False,
    )
    add = parser.add_argument
    add("--help", "-h", action="store_true", help="show this and train_llm.py's flags")
    add("--layouts", nargs="+", metavar="DPxTP",
        help="dp x tp each, on dp*tp processes, or with more dims as rep2-dp2-cp2-tp1 (default: "
        "1x8 2x4 4x2 8x1)")  # fmt: skip
    add("--no-reference", action="store_true",
        help="do not train on one process: the first layout is the reference")  # fmt: skip
    add("--verdict", action="store_true",
        help="train the first steps again in float64, where rounding vanishes and a bug stays; "
        "name where a bug begins, and exit with 1")  # fmt: skip
    add("--verdict-steps", type=positive, default=3, metavar="N",
        help="steps of --verdict (default: 3)")  # fmt: skip
    add("--batch-sizes", nargs="+", type=positive, metavar="B",
        help="sequences per dp rank for each layout, so that global batches differ: no reference, "
        "no deviations, loss over steps and over tokens")  # fmt: skip
    add("--out", type=Path, metavar="DIR",
        help="comparison directory (default: runs/compare-<recipe>)")  # fmt: skip
    add("--collect", nargs="*", type=Path, metavar="RUN",
        help="train nothing: table and picture of these finished run directories of train_llm.py, "
        "or of those in --out")  # fmt: skip
    add("--wandb", choices=("auto", "online", "offline", "disabled"), default="disabled",
        help="as in train_llm.py, for the curves and one run more with table and picture; all in "
        "one group, named after --out (default: disabled)")  # fmt: skip
    add("--launcher", choices=("torchrun",), default="torchrun",
        help="what starts the ranks (default: torchrun)")  # fmt: skip
    options, train_flags = parser.parse_known_args(argv)
    if options.help:
        parser.print_help()
        print(
            f"\nFlags of train_llm.py, all of which may be given but {', '.join(OURS + USELESS)}:\n"
        )
        parse_flags([*train_flags, "--help"])
    _check_options(options, train_flags)
    _check_train_flags(options, train_flags)
    return options, train_flags


def _one_name(name: str) -> str:
    """A layout's name as a run writes it: 2x4 for dp2-tp4, too."""
    return Layout(**parse_layout(name), batch_size=1, micro_batches=1).name


def _check_train_flags(options: argparse.Namespace, train_flags: list[str]) -> None:
    given = {arg.split("=")[0].replace("_", "-") for arg in train_flags}
    batch = ("--batch-size", "--global-batch-size") if options.batch_sizes else ()
    for name in (*OURS, *batch):
        if name in given:
            raise ConfigError(
                f"{name} is set for each layout: leave it out, and name the --layouts"
            )
    for name in USELESS:
        if name in given:
            raise ConfigError(f"{name} has no use in a comparison: leave it out")
    for name, dim in USED_WITH.items():
        layouts = options.layouts or ()
        if name in given and layouts and all(parse_layout(x)[dim] == 1 for x in layouts):
            raise ConfigError(
                f"{name} changes nothing in --layouts {' '.join(layouts)}: leave it out, or name "
                f"one with {dim}"
            )


def _check_options(options: argparse.Namespace, train_flags: list[str]) -> None:
    if options.collect is not None:
        if options.layouts or options.batch_sizes or train_flags:
            extra = "--layouts" if options.layouts else (train_flags or ["--batch-sizes"])[0]
            raise ConfigError(f"--collect trains nothing: leave out {extra}")
        if not options.collect and not options.out:
            raise ConfigError("--collect needs run directories, or the --out of a comparison")
        if options.collect and options.verdict:
            raise ConfigError("--collect RUN judges nothing: name the --out of a --verdict instead")
        return
    options.layouts = [_one_name(name) for name in options.layouts or LAYOUTS]
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

    def planned(name: str, folder: Path, flags: list) -> PlannedRun:
        try:
            world_size, run_dir = math.prod(parse_layout(name).values()), folder / name
            flags = [*common, *map(str, flags), "--run-dir", str(run_dir), *layout_flags(name)]
            config = parse_flags(flags, console=False)
            check_ahead(config, Launch(0, world_size, 0, world_size))
        except ConfigError as error:
            raise ConfigError(f"layout {name}: {error}") from None
        name = str(run_dir.relative_to(options.out))
        return PlannedRun(name, run_dir, world_size, flags, config)

    batches = [[] for _ in options.layouts]
    for i, size in enumerate(options.batch_sizes or ()):
        sizes = parse_layout(options.layouts[i])
        ranks = sizes["dp_replicate"] * sizes["dp"]
        batches[i] = ["--batch-size", size, "--global-batch-size", size * ranks]
    mode, n = ["--wandb", options.wandb], options.verdict_steps
    compression = base.memory.grad_compression
    if options.verdict and compression != "none":
        if options.no_reference:
            raise ConfigError(
                f"--verdict compares --grad-compression {compression} with one process, which "
                "loses nothing: leave out --no-reference"
            )
        if compression == "powersgd" and n <= POWERSGD_START:
            raise ConfigError(
                f"--verdict-steps {n} end before powersgd begins to compress, after step "
                f"{POWERSGD_START}: use --verdict-steps {POWERSGD_START + 1}"
            )
    curves = [
        planned(name, options.out, batch + mode)
        for name, batch in zip(options.layouts, batches, strict=True)
    ]
    verdict = ["--dtype", "float64", "--steps", n, "--fingerprint-steps", n, "--log-every", 1]
    verdict += ["--lr-decay-steps", base.optimizer.lr_decay_steps or base.step.steps]
    verdict += ["--eval-every", 0, "--checkpoint-every", 0, "--wandb", "disabled"]
    names = options.layouts if options.verdict else []
    return base, curves, [planned(name, options.out / "float64", verdict) for name in names]


def _is_free(name: str) -> bool:
    return name in FREE or name.startswith("--wandb")


def make_folder(out: Path) -> None:
    """Make the comparison directory, or refuse one that cannot be written to."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        raise ConfigError(f"--out {out} is not writable ({error.strerror})") from None


def settle_flags(
    options: argparse.Namespace, train_flags: list[str], base: Config, runs: list[PlannedRun]
) -> None:
    """Record what this comparison is, or refuse to go on with another one in its directory.

    Raises:
        ConfigError: in one line, naming what differs.
    """
    out, file = options.out, options.out / "comparison_flags.json"
    new = {"--recipe": base.recipe, "--init-from": base.init_from and str(base.init_from)}
    for section in base.model_dump(mode="json").values():
        if isinstance(section, dict):
            new |= {flag(key): value for key, value in section.items() if not _is_free(flag(key))}
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
    elif found := [run.run_dir for run in runs if run.run_dir.exists()]:
        raise ConfigError(f"{found[0]} is not of a comparison: use another --out")
    for key, value in new.items():
        if key in old and old[key] != value:
            raise ConfigError(
                f"{key} {value} differs from the {old[key]} of the comparison in {out}: "
                "use the same flags, or another --out"
            )
    make_folder(out)
    record = {"flags": train_flags, "resolved": old | new}
    write_atomic(file, json.dumps(record, indent=1) + "\n")


def last_row(run_dir: Path) -> dict | None:
    """The newest whole row of metrics.jsonl, or None."""
    try:
        with RunDir(run_dir).metrics_jsonl.open("rb") as f:
            f.seek(max(0, f.seek(0, os.SEEK_END) - 4096))
            # What follows the last newline is being written.
            return json.loads(f.read().split(b"\n")[-2])
    except (OSError, ValueError, IndexError):
        return None


def _decimal(row: dict | None) -> str:
    return "none" if row is None or row["loss"] is None else f"{row['loss']:.4f}"


class Show:
    """Progress over runs and steps: a bar on a terminal, else plain lines."""

    def __init__(self, runs: int):
        self._runs, self._done, self._bar, self._said = runs, 0, None, 0.0
        if not sys.stdout.isatty() or os.environ.get("TERM") in (None, "dumb"):
            return
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
        from rich.progress import TimeElapsedColumn as Elapsed

        text = TextColumn("{task.description}")
        self._bar = Progress(text, BarColumn(20), MofNCompleteColumn(), Elapsed(), transient=True)
        self._all = self._bar.add_task("runs", total=runs)
        self._steps = self._bar.add_task("steps", total=1)
        self._bar.start()

    def say(self, text: str) -> None:
        """One line, above the bar where there is one."""
        if self._bar:
            self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            print(text, flush=True)

    def begin(self, run: PlannedRun) -> None:
        """A run starts."""
        self._said = time.monotonic()
        self.say(f"{run.name}: run {self._done + 1} of {self._runs}, log {run.log}")

    def step(self, run: PlannedRun, row: dict | None) -> None:
        """Its newest row of metrics, if it has one."""
        done, total = row["step"] if row else 0, run.config.step.steps
        if self._bar:
            text = f"{run.name} steps"
            self._bar.update(self._steps, description=text, completed=done, total=total)
        elif row and time.monotonic() - self._said > SAY_EVERY_S:
            self._said = time.monotonic()
            self.say(f"{run.name}: step {done}/{total}  loss {_decimal(row)}")

    def end(self, run: PlannedRun, seconds: float) -> None:
        """A run has finished."""
        self._done += 1
        loss, steps = _decimal(last_row(run.run_dir)), run.config.step.steps
        self.say(f"{run.name}: {steps} steps in {seconds:.0f} s, loss {loss}")
        if self._bar:
            self._bar.update(self._all, completed=self._done)

    def close(self) -> None:
        """Leave the terminal in order."""
        if self._bar:
            self._bar.stop()


def _end(child: subprocess.Popen) -> None:
    """Have a run saved and ended: torchrun passes the signal to its ranks."""
    if child.poll() is None:
        # An impatient second Ctrl-C would leave ranks behind.
        with _on_signal(signal.SIGINT, signal.SIG_IGN):
            child.terminate()
            try:
                child.wait(GRACE_S)
            except subprocess.TimeoutExpired:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()


@contextlib.contextmanager
def _on_signal(number: int, handler) -> Iterator[None]:
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


def explain_failure(status: dict | None, printed: list[str]) -> tuple[str | None, list[str]]:
    """Why a run has failed, if it said so, and the last lines of what it printed.

    Args:
        status: what this start has written to status.json, if anything.
        printed: by this start, with torchrun's own report, which says less and comes last.
    """
    reports = [i for i, line in enumerate(printed) if TORCHRUN_REPORT.match(line)]
    # Its first line has the exit code of the process, and so the signal that killed it.
    printed = [printable(line) for line in printed[: reports[0] + 1 if reports else None]]
    tail = printed[-LOG_TAIL:]
    if status and status.get("error"):
        rank, step, error = (printable(str(status.get(k))) for k in ("rank", "step", "error"))
        where = f"rank {rank}" if step == "None" else f"rank {rank} in step {step}"
        return f"failed on {where}: {error.removeprefix(f'step {step}: ')}", tail
    refusal = next((line for line in printed if line.startswith(REFUSAL)), None)
    return refusal and f"was refused: {refusal.removeprefix(REFUSAL)}", tail


def run_one(run: PlannedRun, group: str, show: Show) -> None:
    """Train one run to its end; it goes on from its checkpoint if it has one.

    Raises:
        RunFailedError: if it ends in another way than finished.
    """
    environ = {name: value for name, value in os.environ.items() if name not in LAUNCHER}
    environ.pop("WANDB_RUN_ID", None)  # of one run, and these are many
    environ |= {"WANDB_RUN_GROUP": group, "WANDB_NAME": run.name}
    environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does, and then on one process too
    run.log.parent.mkdir(parents=True, exist_ok=True)
    show.begin(run)
    started, before = time.monotonic(), RunDir(run.run_dir).read_status()
    with run.log.open("a", encoding="utf-8") as log:
        begin = log.tell()
        log.write(f"$ {' '.join(run.command)}\n")
        log.flush()
        # A session of its own: Ctrl-C reaches this process alone, and it ends the run in order.
        child = subprocess.Popen(
            run.command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
            env=environ, start_new_session=True,
        )  # fmt: skip
        try:
            while child.poll() is None:
                show.step(run, last_row(run.run_dir))
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(POLL_S)
        finally:
            _end(child)
    if steps_done(run.run_dir) < run.config.step.steps:
        status = RunDir(run.run_dir).read_status()
        # A start that was refused leaves what an earlier one has written.
        status = None if status == before else status
        printed = run.log.read_bytes()[begin:].decode("utf-8", errors="replace")
        cause, tail = explain_failure(status, printed.splitlines())
        state = (status or {}).get("state", "never begun")
        raise RunFailedError(
            (f"{run.name} {cause}\n" if cause else "")
            + f"{run.name} ended with exit code {child.returncode}, status {state}; the end of "
            f"{run.log}:\n" + "\n".join("  " + line for line in tail)
        )
    show.end(run, time.monotonic() - started)


def run_all(runs: list[PlannedRun], out: Path) -> None:
    """Train what has not finished, one run after another."""
    todo = [run for run in runs if steps_done(run.run_dir) < run.config.step.steps]
    show = Show(len(todo))
    try:
        with _on_signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM)):
            for run in runs:
                if run in todo:
                    run_one(run, out.resolve().name, show)
                else:
                    show.say(f"{run.name}: has finished before, not run again")
    finally:
        show.close()


def write_comparison(comparison: dict, out: Path) -> None:
    """Write comparison.json."""
    text = json.dumps(comparison, indent=1, allow_nan=False)
    write_atomic(out / "comparison.json", text + "\n")


def judge_runs(comparison: dict, folder: Path) -> list:
    """Judge the float64 runs below ``folder``, put it into ``comparison``, and print it."""
    from recipes.compare_layouts.judge import judge

    labels = [entry["label"] for entry in comparison["layouts"]]
    base = comparison["reference"]
    others = {name: folder / name for name in labels if name != base}
    try:
        runs = {name: read_run(folder / name) for name in labels}
        if differing := differing_flags(list(runs.values())):
            raise ValueError(f"they differ in {named(list(differing))}, and are not one training")
        losses = {name: lossy(run) for name, run in runs.items()}
        if losses[base]:
            raise ValueError(f"the gradients of the reference {base} are compressed themselves")
        verdicts = judge(folder / base, others, losses)
    except (OSError, ValueError) as error:
        raise RunFailedError(f"the runs in {folder} cannot be judged: {error}") from None
    for verdict in verdicts:
        fine = f"rounding (largest float64 deviation {verdict.deviation:.1e})"
        if verdict.bound is not None:
            fine = (
                f"lossy, as --grad-compression {losses[verdict.layout].compression} is (largest "
                f"float64 deviation {verdict.deviation:.1e}, bound {verdict.bound:.1e})"
            )
        print(f"{verdict.layout}: {f'BUG: {verdict.finding}' if verdict.finding else fine}")
    # JSON has no infinity; there is a finding then.
    comparison["verdict"] = [
        dataclasses.asdict(v) | ({} if math.isfinite(v.deviation) else {"deviation": None})
        for v in verdicts
    ]
    return verdicts


def conclude(
    comparison: dict, options: argparse.Namespace, project: str | None, float64: list[PlannedRun]
) -> int:
    """Files, table, verdict and wandb; the exit code. ``float64``: what the verdict must train."""
    out, code = options.out, 0
    for name, values in comparison["differing_flags"].items():
        if not (options.batch_sizes and name == "--global-batch-size"):
            print(f"note: the runs differ in {name}: {printable(', '.join(map(str, values)))}")
    write_comparison(comparison, out)
    draw(comparison, out / "loss_curves.png")
    print_table(comparison)
    if options.verdict:
        run_all(float64, out)
        code = int(any(v.finding for v in judge_runs(comparison, out / "float64")))
        write_comparison(comparison, out)
        if code:
            draw(comparison, out / "loss_curves.png")
    print(f"written: {out / 'comparison.json'}, {out / 'loss_curves.png'}")
    if code:
        print("after a fix, compare again with another --out: finished runs are not run again")
    if options.wandb != "disabled":
        log_to_wandb(comparison, out / "loss_curves.png", out, options.wandb, project)
    return code


def compare(options: argparse.Namespace, train_flags: list[str]) -> int:
    """Train every layout and report."""
    base, curves, float64 = plan_runs(options, train_flags)
    settle_flags(options, train_flags, base, curves)
    run_all(curves, options.out)
    runs = [read_run(run.run_dir) for run in curves]
    comparison = build_comparison(runs, runs[0], train_flags)
    return conclude(comparison, options, base.run.wandb_project, float64)


def _order(path: Path) -> tuple:
    try:
        return (0, *parse_layout(path.name).values())
    except LayoutError:
        return (1, path.name)


def collect_runs(options: argparse.Namespace) -> list[Run]:
    """The runs of --collect, each with a label of its own.

    Raises:
        ConfigError: if there is none, or a named one has not finished.
    """
    paths = options.collect
    if not paths:
        found = sorted((p.parent for p in options.out.glob("*/run.json")), key=_order)
        paths = [path for path in found if steps_done(path)]
        for path in found:
            if path not in paths:
                print(f"note: {path} has not finished and is left out")
        if not paths:
            raise ConfigError(f"--out {options.out} holds no finished run")
    runs = [read_run(path) for path in dict.fromkeys(paths)]
    names = [run.label for run in runs]
    return [
        dataclasses.replace(run, label=f"{run.label} {run.path}")
        if names.count(run.label) > 1
        else run
        for run in runs
    ]


def collect(options: argparse.Namespace) -> int:
    """Report about runs that have been trained already, here or on a cluster."""
    runs = collect_runs(options)
    options.out = options.out or Path("runs/compare-collected")
    make_folder(options.out)
    named = [run for run in runs if run.layout.name == REFERENCE and not options.no_reference]
    comparison = build_comparison(runs, (named or runs)[0], [])
    if options.verdict and comparison["reference"] is None:
        raise ConfigError(f"--verdict compares runs of one training: {statement(comparison)}")
    for run in runs if options.verdict else ():
        read_run(options.out / "float64" / run.label)  # refuses what has not finished
    return conclude(comparison, options, runs[0].config.run.wandb_project, [])


def main(argv: list[str] | None = None) -> int:
    """The command; its exit code."""
    try:
        options, train_flags = parse_command(sys.argv[1:] if argv is None else argv)
        return collect(options) if options.collect is not None else compare(options, train_flags)
    except ConfigError as error:
        print(f"compare_layouts: error: {error}", file=sys.stderr)
        return 2
    except RunFailedError as error:
        print(f"compare_layouts: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted: start the same command again to go on", file=sys.stderr)
        return 130


if __name__ == "__main__":
    run_command(main, "compare_layouts")
