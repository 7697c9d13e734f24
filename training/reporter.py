"""Where metrics are shown: metrics.jsonl, the terminal, wandb."""

import contextlib
import io
import json
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from training.config import RunSection, wandb_key_configured
from training.metrics import finite
from training.run_dir import RunDir


def _count(number: float) -> str:
    """2100 as 2.1k."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.1f}{unit}"
    return f"{number:.0f}"


def _duration(seconds: float) -> str:
    """108 seconds as 1m48s."""
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes // 60}h{minutes % 60:02d}m" if minutes >= 60 else f"{minutes}m{seconds:02d}s"


def _decimal(number: float | None) -> str:
    return "none" if number is None else f"{number:.4f}"


class _Wandb:
    """The run on wandb. What goes wrong there costs its curve, never the training."""

    def __init__(self, run_dir: RunDir, run: RunSection, config: dict, say: Callable[[str], None]):
        self._run_dir, self._say = run_dir, say
        self._init = {"project": run.wandb_project, "config": config, "dir": run_dir.path}
        online = run.wandb == "online" or (run.wandb == "auto" and wandb_key_configured())
        modes = ["online", "offline"] if online else ["offline"]
        self._modes = [] if run.wandb == "disabled" else modes
        self._run = None
        self._open_next()

    def _open_next(self) -> None:
        while self._modes and self._run is None:
            mode = self._modes.pop(0)
            try:
                self._run = self._open(mode)
            except Exception as error:
                self._give_up(mode, error)

    def _give_up(self, what: str, error: Exception) -> None:
        self._run = None
        reason = (str(error).splitlines() or [""])[0]
        if key := os.environ.get("WANDB_API_KEY"):
            reason = reason.replace(key, "***")
        with contextlib.suppress(Exception):
            # Its service holds the id of a run that failed; the next one needs the same id.
            sys.modules["wandb"].teardown(exit_code=1)
        then = "going on offline" if self._modes else "going on without wandb"
        self._say(f"wandb: {what} failed ({type(error).__name__}: {reason}); {then}")

    def _open(self, mode: str):
        # wandb prompts only where stderr is a terminal, and says things before it reads silent.
        with contextlib.redirect_stderr(io.StringIO()):
            import wandb

            quiet = {"console": "off", "silent": True}
            private = {"disable_code": True, "disable_git": True, "save_code": False}
            bounded = {"init_timeout": 30, "finish_timeout": 60}
            # create_new: never hand back a run that this process has opened before.
            settings = wandb.Settings(**quiet, **private, **bounded, reinit="create_new")
            same = {"id": self._run_dir.wandb_id(), "resume": "allow"}
            run = wandb.init(mode=mode, settings=settings, **same, **self._init)
            # wandb's own counter only grows. A resume repeats steps, so ours is the axis.
            run.define_metric("*", step_metric="step")
        offline = f"offline, upload with: wandb sync {Path(run.dir).parent}"
        self._say(f"wandb: {offline if mode == 'offline' else run.url}")
        return run

    def log(self, record: dict) -> None:
        if self._run is None:
            return
        values = {k: v for k, v in record.items() if v is not None and k != "non_finite"}
        try:
            self._run.log(values | dict.fromkeys(record.get("non_finite", ()), math.nan))
        except Exception as error:
            self._give_up("log", error)
            self._open_next()

    def close(self, exit_code: int) -> None:
        run, self._run, self._modes = self._run, None, []
        if run is not None:
            try:
                run.finish(exit_code=exit_code)
            except Exception as error:
                self._give_up("finish", error)


class Reporter:
    """Writes metrics.jsonl and eval.jsonl, shows progress, feeds wandb. Global rank 0 only."""

    def __init__(
        self,
        run_dir: RunDir,
        run: RunSection,
        *,
        config_dump: dict,
        first_step: int,
        steps: int,
        stream: TextIO | None = None,
    ):
        """``first_step``: steps done before this start; ``steps``: of the whole run.

        ``stream``: where progress is shown; none: stdout.
        """
        self._run_dir, self._steps, self._stream = run_dir, steps, stream or sys.stdout
        self.rows: list[dict] = []  # of this start
        self._bar = None
        self._non_finite_steps = self._count_non_finite()
        self._wandb = _Wandb(run_dir, run, config_dump, self.message)
        self._start_bar(first_step)

    def _count_non_finite(self) -> int:
        with contextlib.suppress(OSError):
            return self._run_dir.metrics_jsonl.read_text("utf-8").count('"non_finite"')
        return 0

    def _start_bar(self, first_step: int) -> None:
        if not self._stream.isatty():
            return
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        console = Console(file=self._stream, force_terminal=True)
        if console.is_dumb_terminal:
            return
        numbers = "loss {task.fields[loss]}  {task.fields[speed]} tokens/s  ETA {task.fields[eta]}"
        columns = TextColumn("step"), MofNCompleteColumn(), BarColumn(20), TextColumn(numbers)
        self._bar = Progress(*columns, console=console, auto_refresh=False, redirect_stderr=False)
        start = {"completed": first_step, "loss": "-", "speed": "-", "eta": "-"}
        self._bar.add_task("", total=self._steps, **start)
        self._bar.start()

    def _append(self, path: Path, record: dict) -> None:
        # Opened each time: a resume replaces the file.
        with path.open("a", encoding="utf-8") as f:
            f.write(json.dumps(record, allow_nan=False) + "\n")

    def log(self, record: dict) -> None:
        """Record a logged step: a dict of :func:`make_record`. Raises OSError on a full disk."""
        record = finite(record)
        self.rows.append(record)
        self._append(self._run_dir.metrics_jsonl, record)
        self._non_finite_steps += "non_finite" in record
        self._show(record)
        self._wandb.log(record | {"non_finite_steps": self._non_finite_steps})

    def _show(self, record: dict) -> None:
        step, loss = record["step"], _decimal(record["loss"])
        speed = _count(record["tokens_per_s"])
        eta = _duration(max(0, self._steps - step) * record["step_s"])
        if self._bar:
            task = self._bar.task_ids[0]
            self._bar.update(task, completed=step, loss=loss, speed=speed, eta=eta, refresh=True)
            return
        wall = f"{record['step_s']:.2f} s/step"
        skipped = f"  {record['skipped_steps']} skipped" if record["skipped_steps"] else ""
        mfu = f"  mfu {record['mfu']:.1%}" if record["mfu"] is not None else ""
        self.message(
            f"step {step}/{self._steps}  loss {loss}  grad_norm {_decimal(record['grad_norm'])}  "
            f"lr {record['lr']:.2e}  {speed} tokens/s  {wall}{mfu}{skipped}  ETA {eta}"
        )

    def log_eval(self, record: dict) -> None:
        """Record an evaluation: ``step``, ``eval_loss`` (mean per token), ``eval_tokens``."""
        record = finite(record)
        self._append(self._run_dir.eval_jsonl, record)
        tokens = _count(record["eval_tokens"])
        loss = _decimal(record["eval_loss"])
        self.message(f"step {record['step']}/{self._steps}  eval_loss {loss}  over {tokens} tokens")
        self._wandb.log(record)

    def message(self, text: str) -> None:
        """One line on the terminal, above the bar where there is one."""
        if self._bar:
            self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            print(text, file=self._stream, flush=True)

    def close(self, exit_code: int = 0) -> None:
        """Leave the terminal in order and end the wandb run, waiting up to a minute for uploads."""
        if self._bar:
            self._bar.stop()
            self._bar = None
        self._wandb.close(exit_code)
