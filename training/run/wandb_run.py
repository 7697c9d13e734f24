"""The run on wandb: a copy of metrics.jsonl and eval.jsonl that costs the training nothing.

A process that is killed loses what wandb had not yet written, and a resumed one repeats steps. So
each start reads back what wandb has of this run, fills in what it lacks, and repeats nothing.
"""

import contextlib
import heapq
import io
import json
import math
import os
import shlex
import struct
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from common.errors import ConfigError
from common.secrets import masked
from training.config.schema import RunSection
from training.run.directory import RunDir

PROJECT = "parallel-recipes"
# Spellings of WANDB_MODE that wandb takes, and what they mean here.
MODES = {"run": "online", "shared": "online", "dryrun": "offline"}

Key = tuple[str, int]  # "train" or "eval", and the step


def _key(row: dict) -> Key:
    return "eval" if "eval_loss" in row else "train", int(row["step"])


def _records(file: Path) -> Iterator[bytes]:
    """The whole records of wandb's transaction log; what a kill has torn off is left out.

    The format is LevelDB's log: blocks of 32 KiB, parts with a header of checksum, length, kind.
    """
    data, position, record = file.read_bytes(), 7, b""
    while position + 7 <= len(data):
        left = 32768 - position % 32768
        if left < 7:
            position += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, position)
        part = data[position + 7 : position + 7 + length]
        if kind not in (1, 2, 3, 4) or len(part) < length:
            return
        position += 7 + length
        record += part
        if kind in (1, 4):  # a whole record, or the last part of one
            yield record
            record = b""


def read_history(folder: Path, wandb_id: str) -> list[dict]:
    """The rows of a run that wandb has on disk, in all its starts. ``folder`` is wandb's own."""
    from wandb.proto.wandb_internal_pb2 import Record

    rows = []
    for file in sorted(folder.glob(f"*run-*-{wandb_id}*/run-{wandb_id}.wandb")):
        with contextlib.suppress(Exception):  # of a torn file, the part before counts
            for data in _records(file):
                record = Record.FromString(data)
                if record.WhichOneof("record_type") == "history":
                    cells = record.history.item
                    rows.append(
                        {(c.key or c.nested_key[0]): json.loads(c.value_json) for c in cells}
                    )
    return rows


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
        known = netrc.netrc(file)
        return any((known.authenticators(host) or ("", "", ""))[2] for host in hosts)
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


def sync_command(folder: Path, wandb_id: str, run_dir: Path) -> str:
    """The command that uploads every start of a run that is not on the server yet.

    ``folder`` is wandb's own. It skips what it has uploaded before; in a folder that other runs
    share, only this run is named.
    """
    own = folder.resolve().is_relative_to(run_dir.resolve())
    starts = "" if own else f"/offline-run-*-{wandb_id}"
    return f"wandb sync {shlex.quote(str(folder))}{starts}"


class WandbRun:
    """The run on wandb. What goes wrong there costs its curve, never the training."""

    def __init__(self, run_dir: RunDir, run: RunSection, config: dict, say: Callable[[str], None]):
        self._run_dir, self._say = run_dir, say
        given = {"name": run.wandb_name, "group": run.wandb_group, "tags": run.wandb_tags}
        self._init = {key: value for key, value in given.items() if value}
        self._init |= {"project": wandb_project(run.wandb_project), "config": config}
        self._init |= _unless_set({"dir": run_dir.path, "resume": "allow"})
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
            run = wandb.init(mode=mode, settings=settings, id=wandb_id, **self._init)
            # wandb's own counter counts rows; ours is the axis.
            run.define_metric("*", step_metric="step")
        folder = Path(run.dir).parent.parent
        history = read_history(folder, run.id)
        self._known, self._non_finite_steps = {_key(row) for row in history if "step" in row}, 0
        # A server knows where its counter stands; offline, each start would begin at 0 again.
        last = max((row["_step"] for row in history if "_step" in row), default=-1)
        self._next_row = last + 1 if mode == "offline" else None
        command = sync_command(folder, run.id, self._run_dir.path)
        offline = f"offline, upload with: {command}"
        self._say(f"wandb: {offline if mode == 'offline' else run.url}")
        # What a killed process had logged and wandb not yet written.
        logged = [_lines(self._run_dir.metrics_jsonl), _lines(self._run_dir.eval_jsonl)]
        for row in heapq.merge(*logged, key=lambda row: row["step"]):
            self._send(run, row)
        return run

    def _send(self, run, row: dict) -> None:
        kind, _ = key = _key(row)
        values = {k: v for k, v in row.items() if v is not None and k != "non_finite"}
        values |= dict.fromkeys(row.get("non_finite", ()), math.nan)
        if kind == "train":
            self._non_finite_steps += "non_finite" in row
            values["non_finite_steps"] = self._non_finite_steps
        if key in self._known:
            return
        if self._next_row is None:
            run.log(values)
        else:
            run.log(values, step=self._next_row, commit=True)
            self._next_row += 1
        self._known.add(key)

    def log(self, record: dict) -> None:
        """Log a row of metrics.jsonl or eval.jsonl, once."""
        if self._run is None or _key(record) in self._known:
            return
        try:
            self._send(self._run, record)
        except Exception as error:
            self._give_up("log", error)
            self._open_next()
            self.log(record)

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
