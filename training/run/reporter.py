"""Where metrics go: metrics.jsonl, the terminal, wandb."""

import contextlib
import json
import sys
import time
from pathlib import Path
from typing import TextIO

from common.files import append_line, sync
from common.output import say
from common.text import count_of, duration
from training.config.schema import RunSection
from training.run.directory import RunDir
from training.run.metrics import finite
from training.run.wandb_run import WandbRun


def _decimal(number: float | None) -> str:
    return "none" if number is None else f"{number:.4f}"


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
        """Open the wandb run, and the bar if there is a terminal.

        Args:
            first_step: steps done before this start.
            steps: of the whole run.
            stream: where progress is shown; by default stdout.
        """
        self._run_dir, self._steps, self._stream = run_dir, steps, stream or sys.stdout
        self.rows: list[dict] = []  # of this start
        self.started = time.monotonic()
        self._bar = None
        self._unwritten: list[tuple[Path, str]] = []
        self._wandb = WandbRun(run_dir, run, config_dump, self.message)
        self._start_bar(first_step)

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
        disk_was_full = bool(self._unwritten)
        self._unwritten.append((path, json.dumps(record, allow_nan=False)))
        try:
            self.flush()
        except OSError as error:
            if not disk_was_full and not self._run_dir.is_lost():
                self.message(f"{path} cannot be written ({error.strerror}); training goes on")

    def flush(self) -> None:
        """Write, in their order, the lines that a full disk did not take.

        Raises:
            OSError: if the disk is still full.
        """
        while self._unwritten:
            self._run_dir.check_held()
            append_line(*self._unwritten[0])
            del self._unwritten[0]

    def sync(self) -> None:
        """Flush the recorded lines to the disk, ahead of the checkpoint of the same step."""
        with contextlib.suppress(OSError):
            self.flush()
            for file in (self._run_dir.metrics_jsonl, self._run_dir.eval_jsonl):
                if file.exists():
                    sync(file)

    def log(self, record: dict) -> None:
        """Record a logged step: a dict of :func:`make_record`."""
        record = finite(record)
        self.rows.append(record)
        self._append(self._run_dir.metrics_jsonl, record)
        self._show(record)
        self._wandb.log(record)

    def _show(self, record: dict) -> None:
        step, loss = record["step"], _decimal(record["loss"])
        speed = count_of(record["tokens_per_s"])
        eta = duration(max(0, self._steps - step) * record["step_s"])
        if self._bar:
            task = self._bar.task_ids[0]
            shown = {"completed": step, "loss": loss, "speed": speed, "eta": eta}
            with contextlib.suppress(OSError):
                self._bar.update(task, refresh=True, **shown)
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
        tokens = count_of(record["eval_tokens"])
        loss = _decimal(record["eval_loss"])
        self.message(f"step {record['step']}/{self._steps}  eval_loss {loss}  over {tokens} tokens")
        self._wandb.log(record)

    def message(self, text: str) -> None:
        """One line on the terminal, above the bar where there is one."""
        if self._bar:
            with contextlib.suppress(OSError):
                self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            say(text, self._stream)

    def close(self, exit_code: int = 0) -> None:
        """Leave the terminal in order and end the wandb run, waiting up to a minute for uploads."""
        with contextlib.suppress(OSError):
            self.flush()
        if self._bar:
            with contextlib.suppress(OSError):
                self._bar.stop()
            self._bar = None
        self._wandb.close(exit_code)
