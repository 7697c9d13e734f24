"""Train the runs of a comparison one after another, each in processes of its own."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from common.files import REPO
from common.text import printable
from recipes.compare_layouts.results import steps_done
from training.config.schema import Config
from training.run.directory import RunDir

TRAIN = REPO / "train_llm.py"
LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
REFUSAL = "train_llm.py: error: "
# torchrun reports the process that failed after all processes have ended; the report begins so.
TORCHRUN_REPORT = re.compile(r"E\d{4} .*torch/distributed/elastic/.*failed \(exitcode: ")
LOG_TAIL = 20  # lines of a failed run's log that are shown
# Seconds for a run to save and end. torchrun kills its ranks after 30 by itself; killed earlier, it
# would leave them behind.
GRACE_S = 60.0
POLL_S = 0.3
SAY_EVERY_S = 30.0  # between two lines about the same run, where there is no terminal


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

    def is_finished(self) -> bool:
        """Whether the run has trained all of its steps."""
        return steps_done(self.run_dir) >= self.config.step.steps


def last_row(run_dir: Path) -> dict | None:
    """The newest whole row of metrics.jsonl, or None."""
    try:
        with RunDir(run_dir).metrics_jsonl.open("rb") as f:
            f.seek(max(0, f.seek(0, os.SEEK_END) - 4096))
            # What follows the last newline is being written.
            return json.loads(f.read().split(b"\n")[-2])
    except (OSError, ValueError, IndexError):
        return None


def _loss(row: dict | None) -> str:
    return "none" if row is None or row["loss"] is None else f"{row['loss']:.4f}"


class Progress:
    """Says how far the runs are, a line at a time."""

    def __init__(self, runs: int):
        self._runs, self._done = runs, 0

    def begin(self, name: str, steps: int, log: Path) -> None:
        """A run of ``steps`` optimizer steps starts."""
        self._name, self._steps = name, steps
        self._started = self._last = time.monotonic()
        print(f"{name}: run {self._done + 1} of {self._runs}, log {log}", flush=True)

    def step(self, row: dict | None) -> None:
        """The newest row of metrics of the run, if it has one."""
        if row and time.monotonic() - self._last > SAY_EVERY_S:
            self._last = time.monotonic()
            step = f"step {row['step']}/{self._steps}"
            print(f"{self._name}: {step}  loss {_loss(row)}", flush=True)

    def end(self, row: dict | None) -> None:
        """The run has finished, with this last row."""
        self._done += 1
        seconds = time.monotonic() - self._started
        text = f"{self._name}: {self._steps} steps in {seconds:.0f} s, loss {_loss(row)}"
        print(text, flush=True)


def train_runs(runs: list[PlannedRun], out: Path) -> None:
    """Train the runs that have not finished, one after another.

    Raises:
        RunFailedError: if one ends in another way than finished.
    """
    unfinished = [run for run in runs if not run.is_finished()]
    progress = Progress(len(unfinished))
    with _on_signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM)):
        for run in runs:
            if run in unfinished:
                _train(run, out.resolve().name, progress)
            else:
                print(f"{run.name}: has finished before, not run again", flush=True)


def _train(run: PlannedRun, group: str, progress: Progress) -> None:
    """Train one run to its end, from its checkpoint if it has one; ``group``: its group on wandb.

    Raises:
        RunFailedError: if it ends in another way than finished.
    """
    steps = run.config.step.steps
    run.log.parent.mkdir(parents=True, exist_ok=True)
    progress.begin(run.name, steps, run.log)
    status_before = RunDir(run.run_dir).read_status()
    with run.log.open("a", encoding="utf-8") as log:
        log_start = log.tell()
        log.write(f"$ {' '.join(run.command)}\n")
        log.flush()
        # In a session of its own, the run does not get the Ctrl-C of this process, which ends it
        # in order.
        child = subprocess.Popen(
            run.command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=_environment(run, group),
            start_new_session=True,
        )
        try:
            while child.poll() is None:
                progress.step(last_row(run.run_dir))
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(POLL_S)
        finally:
            _end(child)
    if not run.is_finished():
        status = RunDir(run.run_dir).read_status()
        # The status of an earlier start stays where this one was refused.
        status = {} if status in (None, status_before) else status
        printed = run.log.read_bytes()[log_start:].decode("utf-8", errors="replace")
        cause, tail = explain_failure(status, printed.splitlines())
        raise RunFailedError(
            (f"{run.name} {cause}\n" if cause else "")
            + f"{run.name} ended with exit code {child.returncode}, status "
            f"{status.get('state', 'never begun')}; the end of {run.log}:\n"
            + "\n".join(f"  {line}" for line in tail)
        )
    progress.end(last_row(run.run_dir))


def _environment(run: PlannedRun, group: str) -> dict[str, str]:
    # A launcher around this process, and a wandb id, are of one run; a comparison has many.
    environ = {k: v for k, v in os.environ.items() if k not in (*LAUNCHER, "WANDB_RUN_ID")}
    environ |= {"WANDB_RUN_GROUP": group, "WANDB_NAME": run.name}
    environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does, and then on one process too
    return environ


def _end(child: subprocess.Popen) -> None:
    """Have a run save and end: torchrun passes the signal to its ranks."""
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
    # The first line of the report has the exit code, and so the signal that killed the process.
    printed = [printable(line) for line in printed[: reports[0] + 1 if reports else None]]
    tail = printed[-LOG_TAIL:]
    if status and status.get("error"):
        rank, step, error = (printable(str(status.get(k))) for k in ("rank", "step", "error"))
        where = f"rank {rank}" if step == "None" else f"rank {rank} in step {step}"
        return f"failed on {where}: {error.removeprefix(f'step {step}: ')}", tail
    refusal = next((line for line in printed if line.startswith(REFUSAL)), None)
    return refusal and f"was refused: {refusal.removeprefix(REFUSAL)}", tail
