"""The run on wandb: a copy of metrics.jsonl and eval.jsonl that costs the training nothing.

wandb's own step is the optimizer step. Each start first logs the rows that the two files have.
Online, wandb resumes the run, and the steps that its server has are left out; offline, each start
has the whole history, so that only the newest one is uploaded.
"""

import contextlib
import heapq
import io
import json
import math
import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

from common.errors import ConfigError
from common.secrets import masked
from training.config.schema import RunSection
from training.run.directory import RunDir

PROJECT = "parallel-recipes"
# Spellings of WANDB_MODE that wandb takes, and what they mean here.
MODES = {"run": "online", "shared": "online", "dryrun": "offline"}


def _lines(file: Path) -> list[dict]:
    return (
        [json.loads(line) for line in file.read_text("utf-8").splitlines()] if file.exists() else []
    )


def wandb_key_configured() -> bool:
    """Whether wandb could log in without asking: an API key in the environment or in netrc."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    import netrc
    from urllib.parse import urlparse

    # The default server has had both names.
    hosts = ["api.wandb.ai", "api.forge.coreweave.com"]
    if url := os.environ.get("WANDB_BASE_URL"):
        hosts = [urlparse(url).hostname]
    # RuntimeError: there is no home directory.
    with contextlib.suppress(OSError, RuntimeError, netrc.NetrcParseError):
        file = Path(os.environ.get("NETRC") or Path.home() / ".netrc")
        accounts = netrc.netrc(file)
        return any((accounts.authenticators(host) or ("", "", ""))[2] for host in hosts)
    return False


def wandb_mode(flag: str) -> str:
    """``online``, ``offline`` or ``disabled``: the flag's, else the environment's, else by the key.

    Raises:
        ConfigError: in one line, if the environment asks for what there is not.
    """
    asked, source = flag, f"--wandb {flag}"
    if flag == "auto":
        if os.environ.get("WANDB_DISABLED", "").lower() in ("true", "1", "yes", "on"):
            return "disabled"
        variable = os.environ.get("WANDB_MODE") or "auto"
        asked, source = MODES.get(variable.lower(), variable.lower()), f"WANDB_MODE={variable}"
    if asked not in ("auto", "online", "offline", "disabled"):
        raise ConfigError(f"{source} is no mode of wandb: use online, offline or disabled")
    if asked == "online" and not wandb_key_configured():
        raise ConfigError(
            f"{source} needs an API key and finds none: set WANDB_API_KEY, "
            "run 'wandb login', or use --wandb offline"
        )
    if asked == "auto":
        return "online" if wandb_key_configured() else "offline"
    return asked


def wandb_project(flag: str | None) -> str:
    """The project on wandb: the flag's, else the environment's, else ours."""
    return flag or os.environ.get("WANDB_PROJECT") or PROJECT


def _unless_set(ours: dict) -> dict:
    """Those of our settings of wandb that no variable of the environment states."""
    return {k: v for k, v in ours.items() if not os.environ.get(f"WANDB_{k.upper()}")}


class WandbRun:
    """The run on wandb. What goes wrong there costs its curve, never the training."""

    def __init__(self, run_dir: RunDir, run: RunSection, config: dict, say: Callable[[str], None]):
        self._run_dir, self._say = run_dir, say
        given = {"name": run.wandb_name, "group": run.wandb_group, "tags": run.wandb_tags}
        self._init = {key: value for key, value in given.items() if value}
        self._init |= {"project": wandb_project(run.wandb_project), "config": config}
        self._init |= _unless_set({"dir": run_dir.path})
        self._modes, self._run = [], None
        try:
            mode = wandb_mode(run.wandb)
        except ConfigError:  # refused before a training starts, on the rank that opens this
            mode = "online"
        if mode != "disabled":
            self._modes = ["online", "offline"] if mode == "online" else ["offline"]
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
        reason = masked((str(error).splitlines() or [""])[0])
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
            # The service of the process that started this one, which may be gone, is not ours.
            os.environ.pop("WANDB_SERVICE", None)
            # create_new: never hand back a run that this process has opened before.
            ours = _unless_set(quiet | private | bounded)
            settings = wandb.Settings(**ours, reinit="create_new")
            wandb_id = self._run_dir.wandb_id(os.environ.get("WANDB_RUN_ID"))
            # An offline start has the whole history: to resume would add it to what is uploaded.
            resume = _unless_set({"resume": "allow"}) if mode == "online" else {}
            run = wandb.init(mode=mode, settings=settings, id=wandb_id, **self._init, **resume)
            run.define_metric("*", step_metric="step")
        offline = f"offline, upload with: wandb sync {shlex.quote(run.sync_dir)}"
        self._say(f"wandb: {offline if mode == 'offline' else run.url}")
        self._non_finite_steps = 0
        logged = [_lines(self._run_dir.metrics_jsonl), _lines(self._run_dir.eval_jsonl)]
        for row in heapq.merge(*logged, key=lambda row: row["step"]):
            self._send(run, row)
        return run

    def _send(self, run, row: dict) -> None:
        values = {k: v for k, v in row.items() if v is not None and k != "non_finite"}
        values |= dict.fromkeys(row.get("non_finite", ()), math.nan)
        if "eval_loss" not in row:
            self._non_finite_steps += "non_finite" in row
            values["non_finite_steps"] = self._non_finite_steps
        # The server has the steps before. Rows of one step make one row of wandb's.
        if row["step"] >= run.starting_step:
            run.log(values, step=row["step"])

    def log(self, record: dict) -> None:
        """Log a row that metrics.jsonl or eval.jsonl has, in the order of their steps."""
        if self._run is None:
            return
        try:
            self._send(self._run, record)
        except Exception as error:
            self._give_up("log", error)
            self._open_next()  # which logs the row, as any other

    def close(self, exit_code: int) -> None:
        """End the run, waiting up to a minute for uploads."""
        run, self._run, self._modes = self._run, None, []
        if run is not None:
            try:
                run.finish(exit_code=exit_code)
                # Its service writes a little later, unless it is waited for.
                sys.modules["wandb"].teardown(exit_code=exit_code)
            except Exception as error:
                self._give_up("finish", error)
