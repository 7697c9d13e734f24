"""Progress over the runs of a comparison: a bar on a terminal, else plain lines."""

import os
import sys
import time
from pathlib import Path

SAY_EVERY_S = 30.0  # between two lines about the same run, where there is no terminal


def _loss(row: dict | None) -> str:
    return "none" if row is None or row["loss"] is None else f"{row['loss']:.4f}"


class Progress:
    """Shows which run is training, and how far it is."""

    def __init__(self, runs: int):
        self._runs, self._done, self._bar = runs, 0, None
        if not sys.stdout.isatty() or os.environ.get("TERM") in (None, "dumb"):
            return
        from rich import progress

        columns = (
            progress.TextColumn("{task.description}"),
            progress.BarColumn(20),
            progress.MofNCompleteColumn(),
            progress.TimeElapsedColumn(),
        )
        self._bar = progress.Progress(*columns, transient=True)
        self._runs_task = self._bar.add_task("runs", total=runs)
        self._steps_task = self._bar.add_task("steps", total=1)
        self._bar.start()

    def say(self, text: str) -> None:
        """One line, above the bar where there is one."""
        if self._bar:
            self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            print(text, flush=True)

    def begin(self, name: str, steps: int, log: Path) -> None:
        """A run of ``steps`` optimizer steps starts."""
        self._name, self._steps = name, steps
        self._started = self._said = time.monotonic()
        self.say(f"{name}: run {self._done + 1} of {self._runs}, log {log}")

    def step(self, row: dict | None) -> None:
        """The newest row of metrics of the run, if it has one."""
        step, steps = row["step"] if row else 0, self._steps
        if self._bar:
            text = f"{self._name} steps"
            self._bar.update(self._steps_task, description=text, completed=step, total=steps)
        elif row and time.monotonic() - self._said > SAY_EVERY_S:
            self._said = time.monotonic()
            self.say(f"{self._name}: step {step}/{steps}  loss {_loss(row)}")

    def end(self, row: dict | None) -> None:
        """The run has finished, with this last row."""
        self._done += 1
        seconds = time.monotonic() - self._started
        self.say(f"{self._name}: {self._steps} steps in {seconds:.0f} s, loss {_loss(row)}")
        if self._bar:
            self._bar.update(self._runs_task, completed=self._done)

    def close(self) -> None:
        """Leave the terminal in order."""
        if self._bar:
            self._bar.stop()
