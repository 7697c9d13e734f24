"""How a run ends: finished, stopped on purpose, failed or stuck, and what is said of it."""

import contextlib
import logging
import math
import os
import signal
import statistics
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

import torch.distributed as dist

from common.errors import ConfigError
from common.files import git_commit
from common.output import say
from common.text import duration
from parallel.layout import Layout
from parallel.mesh import Ranks
from training.checkpoint.folder import checkpoint_name, step_of
from training.checkpoint.saver import CheckpointError, TrainState
from training.config.schema import Config
from training.config.values import seconds
from training.run.diagnosis import Diagnosis
from training.run.directory import LOGGER, LostRunError, RunDir
from training.run.heartbeat import Heartbeat, Stall
from training.run.launcher import GONE, Launcher, report_failure
from training.run.outcome import LOST, SIGNAL, TIME, NonFiniteError
from training.run.reporter import Reporter

# Training and heartbeat may both find that the run has failed; neither ends it while one speaks.
_speaking = threading.Lock()
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
# Seconds that a rank's own diagnosis may take once its failure is reported.
_LEAVING = 2.0


@contextlib.contextmanager
def reporting(
    run: RunDir,
    config: Config,
    layout: Layout,
    ranks: Ranks,
    state: TrainState,
    checkpoint: Path | None,
    lines: list[str],
) -> Iterator[tuple[Reporter | None, Heartbeat]]:
    """The reporter of this run (None but on rank 0), its heartbeat, and what is said if it fails.

    If the block raises or the training is stuck, the process ends with exit code 1. Every rank's
    log has its own traceback. The rank that fails first writes ``status.json`` and is the one that
    speaks on stderr, since the others mostly fail of its absence.

    Args:
        checkpoint: from which this start goes on.
        lines: what is said of the run.
    """

    def stalled(stall: Stall) -> None:
        leaving = heartbeat.leave()
        logging.getLogger(LOGGER).error("%s", stall.message)
        _speak(run, heartbeat, stall.rank, stall.step, stall.message, silent=stall.silent)
        leaving.join(_LEAVING)
        _end(run, None)

    diagnosis = Diagnosis(run, ranks)
    reporter, heartbeat = None, Heartbeat(ranks, config.run.comm_timeout, stalled, diagnosis)
    try:
        if ranks.rank == 0:
            first = step_of(checkpoint.name) if checkpoint else 0
            dump, steps = _described(config, layout), config.step.steps
            reporter = Reporter(run, config.run, config_dump=dump, first_step=first, steps=steps)
            for line in lines:
                reporter.message(line)
        yield reporter, heartbeat
    except BaseException as error:  # DCP's own exception is not an Exception
        if isinstance(error, SystemExit | KeyboardInterrupt):
            raise
        if run.is_lost() and isinstance(error, LostRunError | CheckpointError | OSError):
            # All ranks find it at one place, and none may write a word there.
            logging.getLogger(LOGGER).error("%s", error)
            if reporter:
                say(f"train_llm.py: error: {error}", sys.stderr)
            _end(run, reporter)
        leaving = heartbeat.leave(error, _is_lost_peer(error))
        _fail(error, run, ranks, state, heartbeat)
        leaving.join(_LEAVING)
        _end(run, reporter)


def _described(config: Config, layout: Layout) -> dict:
    """The config, and what else wandb is told of a run."""
    return config.model_dump(mode="json") | {
        "layout_name": layout.name,
        "world_size": layout.world_size,
        "num_parameters": config.model.num_parameters,
        "git_commit": git_commit(),
    }


def _end(run: RunDir, reporter: Reporter | None) -> None:
    """End this process with exit code 1."""
    if reporter:
        reporter.close(exit_code=1)
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    # torchrun prints that of the rank that it sees end first, which need not have spoken.
    if not run.is_lost() and (said := (run.read_status() or {}).get("error")):
        report_failure(said)
    with _speaking:
        # Not sys.exit: a process group whose peers are gone may never come down.
        os._exit(1)


def _fail(
    error: BaseException, run: RunDir, ranks: Ranks, state: TrainState, heartbeat: Heartbeat
) -> None:
    step = state.step + 1
    logging.getLogger(LOGGER).exception("failed in step %d", step)
    if run.has_failed():
        if not isinstance(error, NonFiniteError | CheckpointError):
            heartbeat.linger()
        return
    # The first two are raised on all ranks at one place: each leaves its own diagnosis unasked.
    if isinstance(error, NonFiniteError):
        _speak(run, None, error.ranks[0], error.step, str(error))
    elif isinstance(error, CheckpointError):
        _speak(run, None, ranks.rank, state.step, str(error))
    elif _is_lost_peer(error) and (stall := heartbeat.find_stall()):
        # A process that was killed cannot speak for itself.
        _speak(run, heartbeat, stall.rank, stall.step, stall.message, silent=stall.silent)
    elif isinstance(error, ConfigError):  # a line that says all, as of tokens that have changed
        _speak(run, heartbeat, ranks.rank, step, str(error))
    else:
        text = f"{type(error).__name__}: {error}"
        _speak(run, heartbeat, ranks.rank, step, text, traceback.format_exc().rstrip())


def _is_lost_peer(error: BaseException) -> bool:
    return isinstance(error, dist.DistError) or "gloo" in str(error)


def _speak(
    run: RunDir,
    heartbeat: Heartbeat | None,
    rank: int,
    step: int,
    text: str,
    detail: str | None = None,
    silent: Collection[int] = (),
) -> None:
    """Say that ``rank`` failed, if no rank has said anything yet, and then ask where all are."""
    with _speaking:
        if run.fail(rank, step, text):
            say(f"train_llm.py: error on rank {rank}: {detail or text}", sys.stderr)
            if heartbeat:
                heartbeat.ask_all(silent)
                what = "says which rank was where"
                say(f"train_llm.py: python -m launch.diagnose {run.path} {what}", sys.stderr)
        elif heartbeat:
            heartbeat.linger()


def report_save(
    run: RunDir, ranks: Ranks, reporter: Reporter | None
) -> Callable[[str | None], None]:
    """What is said when a checkpoint cannot be written (its fault), and when the next one can."""

    def report(fault: str | None) -> None:
        text = f"{fault}; training goes on" if fault else "checkpoints can be written again"
        logging.getLogger(LOGGER).warning(text)
        # Where the directory is lost, no training goes on, and the end says why.
        if reporter and not run.is_lost():
            say(f"train_llm.py: warning: {text}", sys.stderr)
            # Where nothing can be written, there is nothing to be done about that.
            with contextlib.suppress(OSError):
                run.write_status("running", **({"checkpoint_fault": fault} if fault else {}))

    return report


def stop_requests(
    stop_after: str | None, run: RunDir, ranks: Ranks, launcher: Launcher
) -> Callable[[], str | None]:
    """Catch the signals that ask to stop; the result says why this process is to stop, or None.

    Args:
        stop_after: ``--stop-after``.
        run: rank 0 also asks to stop when this is lost.
        launcher: its end is a reason to stop, from here on at a step.
    """
    received = []
    launcher.training = True
    for name in STOP_SIGNALS:
        # Under nohup, the end of the terminal is none of the run.
        if name != signal.SIGHUP or signal.getsignal(name) != signal.SIG_IGN:
            signal.signal(name, lambda number, _: received.append(number))
    end = launcher.started + seconds(stop_after) if stop_after else math.inf

    def why() -> str | None:
        if ranks.rank == 0 and run.is_lost():
            return LOST
        if received:
            return SIGNAL
        return GONE if launcher.gone() else TIME if time.monotonic() >= end else None

    return why


def _summary(outcome: str, run: RunDir, state: TrainState, reporter: Reporter) -> list[str]:
    """What this start has come to, a line each."""
    lines = []
    if rows := reporter.rows:
        speed = statistics.median(row["tokens_per_s"] for row in rows)
        memory = max(row["peak_memory_bytes"] or 0 for row in rows) / 2**20
        loss = "none" if rows[-1]["loss"] is None else f"{rows[-1]['loss']:.4f}"
        lines.append(
            f"{outcome} at step {state.step}: loss {loss}, "
            f"median {speed:,.0f} tokens/s, peak memory {memory:,.0f} MiB per rank"
        )
    lines.append(
        f"start {run.starts()} of this run took {duration(time.monotonic() - reporter.started)}; "
        f"newest checkpoint: {checkpoint_name(state.step)}"
    )
    return [*lines, f"run directory: {run.path}"]


def finish(
    stopped: str | None,
    run: RunDir,
    state: TrainState,
    ranks: Ranks,
    reporter: Reporter | None,
    heartbeat: Heartbeat,
    planned: list[str],
) -> None:
    """Write the final status, say where everything is, and take the process group down.

    Args:
        planned: what the planner has said, beside what was measured.
    """
    heartbeat.stop()
    outcome = "stopped" if stopped else "finished"
    if reporter:
        reporter.flush()
        run.write_status(outcome, step=state.step, **({"reason": stopped} if stopped else {}))
        reporter.close()
        for line in [*planned, *_summary(outcome, run, state, reporter)]:
            say(line, sys.stdout)
        try:
            sys.stdout.flush()
        except OSError:
            # What could not be printed would make Python's own exit fail.
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    run.unlock()
    # A batch script repeats its signal until all have left, and Python, as it exits, gives signals
    # that it handles their deadly default back.
    for name in (*STOP_SIGNALS, signal.SIGUSR2):
        signal.signal(name, signal.SIG_IGN)
    logging.getLogger(LOGGER).info("%s at step %d", outcome, state.step)
    # Everything is saved. A rank that has left already closes its connections on the others.
    with contextlib.suppress(RuntimeError):
        dist.barrier(ranks.control)
        dist.destroy_process_group()
