"""The run directory: what was started in it, how it stands, what it has logged. Torch-free.

Rank 0 writes everything here but the logs of other ranks and ``status.json``, which any rank may
write through :meth:`RunDir.fail`. Files that are rewritten are replaced whole, so that a reader, or
a kill at any instant, leaves the old text or the new one.
"""

import contextlib
import errno
import json
import logging
import os
import secrets
import shutil
import socket
import stat
import string
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from common.errors import ConfigError
from common.files import read_bounded, read_json, readable, write_atomic
from common.secrets import masked
from training.checkpoint import folder as checkpoint_dir
from training.run.lock import LockedDirectory
from training.run.logs import LOGGER

State = Literal["running", "finished", "stopped", "failed"]
# A line for each of ten million steps.
_MAX_LOG_BYTES = 1 << 33
_ID_LETTERS = string.ascii_lowercase + string.digits


class LostRunError(RuntimeError):
    """The run directory is not that of this start any more; the message is one line."""


def read_object(path: Path) -> dict | None:
    """The JSON object in a file; None if there is no file, or no object in it.

    Raises:
        ConfigError: if the file system does not let it be read.
    """
    with readable(path), contextlib.suppress(ValueError):
        value = read_json(path)
        return value if isinstance(value, dict) else None
    return None


def _kept(line: bytes, step: int) -> bool:
    """Whether a line of metrics is whole and of no later step."""
    try:
        logged = json.loads(line.decode())["step"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return False
    return type(logged) is int and 0 <= logged <= step


class RunDir(LockedDirectory):
    """Paths and records of one run; making the object touches nothing on disk."""

    def __init__(self, path: Path):
        super().__init__(path)
        self.config_toml = self.path / "config.toml"
        self.run_json = self.path / "run.json"
        self.status_json = self.path / "status.json"
        self.metrics_jsonl = self.path / "metrics.jsonl"
        self.eval_jsonl = self.path / "eval.jsonl"
        self.fingerprints_jsonl = self.path / "fingerprints.jsonl"
        self.checkpoints = self.path / checkpoint_dir.CHECKPOINTS
        self.profile = self.path / "profile"
        self.tokenizer = self.path / "tokenizer"
        self.diagnosis = self.path / "diagnosis"
        self._failed_marker = self.path / ".failed"

    def log_file(self, rank: int) -> Path:
        """The log of one global rank."""
        return self.path / "logs" / f"rank-{rank:05d}.log"

    def diagnosis_file(self, rank: int) -> Path:
        """The post-mortem of one global rank, written when the run is stuck or fails."""
        return self.diagnosis / f"rank-{rank:05d}.json"

    def put_diagnosis_aside(self) -> None:
        """Rename the post-mortems of an earlier start to ``diagnosis.previous``, which is replaced.

        Rank 0 calls this before any rank of this start can write one.

        Raises:
            OSError: if the directory cannot be written.
        """
        if self.diagnosis.exists():
            previous = self.diagnosis.with_suffix(".previous")
            shutil.rmtree(previous, ignore_errors=True)
            os.replace(self.diagnosis, previous)

    def lock(self) -> None:
        """Begin a start: create the directory and lock it for as long as this process lives.

        Only global rank 0 calls this, before any rank can call :meth:`fail`.

        Raises:
            ConfigError: in one line, if another job has locked it or it is not writable.
        """
        if self._lock_fd is not None:
            return
        try:
            for folder in (self.path, self.checkpoints, self.log_file(0).parent):
                folder.mkdir(parents=True, exist_ok=True)
                if not os.access(folder, os.W_OK | os.X_OK):
                    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        except OSError as error:
            raise self._not_writable(error) from None
        super().lock()
        self._failed_marker.unlink(missing_ok=True)

    def check_readable(self) -> None:
        """Check the files that a start reads and rewrites, before it changes anything.

        Raises:
            ConfigError: if a path cannot be read or is no regular file.
        """
        for path in (self.config_toml, self.run_json, self.status_json, *self._logs):
            with readable(path):
                if not stat.S_ISREG(os.stat(path).st_mode):
                    raise ConfigError(f"{path} is no regular file: remove it")
                os.close(os.open(path, os.O_RDONLY))

    def _read_run(self) -> dict | None:
        """run.json; None where it is missing, or where no training can have written it."""
        run = read_object(self.run_json)
        return run if run and isinstance(run.get("starts"), list) else None

    def _edit_run(self, edit: Callable[[dict], None]) -> dict:
        """Rewrite run.json; a corrupt one is renamed, since no training depends on it."""
        run = self._read_run()
        if run is None:
            if os.path.lexists(self.run_json):
                checkpoint_dir.put_aside(self.run_json, "corrupt")
            run = {"wandb_id": None, "wandb_path": None, "starts": []}
        edit(run)
        write_atomic(self.run_json, json.dumps(run, indent=1) + "\n")
        return run

    def newest_checkpoint(self) -> Path | None:
        """The newest complete checkpoint, or None.

        Raises:
            ConfigError: if the folder cannot be read, as without permission.
        """
        return checkpoint_dir.newest_checkpoint(self.checkpoints)

    def record_start(self, record: dict) -> None:
        """Append the record of this start to run.json (rank 0)."""
        self._edit_run(lambda run: run["starts"].append(record))

    def starts(self) -> int:
        """How many starts of this run are recorded."""
        return len((self._read_run() or {}).get("starts", ()))

    def begun_by(self, launch_id: str) -> bool:
        """Whether the last recorded start was of this launch."""
        last = next(reversed((self._read_run() or {}).get("starts", [])), None)
        ids = last.get("launch") if isinstance(last, dict) else None
        return isinstance(ids, list) and launch_id in ids

    def wandb_id(self, given: str | None = None) -> str:
        """The id of this run on wandb: the same after a resume, a new one in a copied directory.

        ``given`` is an id from the environment, which the run keeps from then on.
        """
        run, here = self._read_run() or {}, str(self.path.resolve())
        same = isinstance(run.get("wandb_id"), str) and run.get("wandb_path") == here
        if not same or given not in (None, "", run["wandb_id"]):
            new = given or "".join(secrets.choice(_ID_LETTERS) for _ in range(10))
            run = self._edit_run(lambda run: run.update(wandb_id=new, wandb_path=here))
        return run["wandb_id"]

    def write_status(self, state: State, **fields) -> None:
        """Write the state of this start (rank 0); a failure that a rank has reported stays.

        ``time`` is in unix seconds; ``host`` and ``pid`` are those of the writer.
        """
        if not self.has_failed():
            self._write_status(state, fields)

    def _write_status(self, state: State, fields: dict) -> None:
        self.check_held()
        status = {
            "state": state,
            "time": time.time(),
            "host": socket.gethostname(),
            "pid": os.getpid(),
            **fields,
        }
        write_atomic(self.status_json, json.dumps(status, indent=1) + "\n")

    def fail(self, rank: int, step: int | None, error: str) -> bool:
        """Report a failure from any rank. The first one of a start wins: the others follow from it.

        An error in here is only logged, so that it cannot hide the failure.

        Returns:
            Whether this rank is to print its failure: it is the one in status.json, or nothing can
            be written there.
        """
        try:
            self.check_held()
            os.close(os.open(self._failed_marker, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
            self._write_status("failed", {"rank": rank, "step": step, "error": masked(error)})
        except FileExistsError:
            return False
        except OSError as fault:
            # No other rank may be able to report.
            logging.getLogger(LOGGER).error("cannot write %s: %s", self.status_json, fault)
        return True

    def has_failed(self) -> bool:
        """Whether a rank of this start has reported a failure."""
        return os.path.lexists(self._failed_marker)

    def read_status(self) -> dict | None:
        """The last status, or None if none can be read."""
        return read_object(self.status_json)

    @property
    def _logs(self) -> tuple[Path, ...]:
        return self.metrics_jsonl, self.eval_jsonl, self.fingerprints_jsonl

    def has_logged(self) -> bool:
        """Whether an earlier start has logged a step."""
        with contextlib.suppress(FileNotFoundError):
            return os.stat(self.metrics_jsonl).st_size > 0
        return False

    def cut_metrics(self, step: int) -> None:
        """Drop what was logged after ``step``, and torn lines; the bytes of the others stay.

        Rank 0 calls this on a resume: the steps after the checkpoint are trained again.

        Raises:
            OSError: if a file cannot be read or written.
            ConfigError: if no training can have written a file.
        """
        for path in self._logs:
            try:
                old = read_bounded(path, _MAX_LOG_BYTES)
            except FileNotFoundError:
                continue
            except ValueError as error:
                raise ConfigError(f"{path} {error}: remove it, or name another --run-dir") from None
            # A kill may come between an object and its newline, which is added here.
            lines = [line for line in old.split(b"\n") if _kept(line, step)]
            new = b"".join(line + b"\n" for line in lines)
            if new != old:
                write_atomic(path, new.decode("utf-8"))
