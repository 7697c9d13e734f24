"""The run directory: who holds it, what was started in it, how it ended. Torch-free.

Rank 0 writes everything here but the logs of other ranks, and but for one file that any rank may
write: ``status.json``, through :meth:`RunDir.fail`. Files that are rewritten are replaced
whole, so that a reader, or a kill at any instant, finds the old text or the new one.
"""

import contextlib
import errno
import fcntl
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

State = Literal["running", "finished", "stopped", "failed"]
LOGGER = "parallel_recipes"
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
    """Whether a line of metrics is whole and no later than ``step``."""
    try:
        logged = json.loads(line.decode())["step"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return False
    return type(logged) is int and 0 <= logged <= step


class RunDir:
    """Paths and records of one run; making the object touches nothing on disk."""

    def __init__(self, path: Path):
        self.path = Path(path)
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
        self.lock_file = self.path / ".lock"
        self._failed_marker = self.path / ".failed"
        self._lock_fd: int | None = None

    def log_file(self, rank: int) -> Path:
        """The log of one global rank."""
        return self.path / "logs" / f"rank-{rank:05d}.log"

    def diagnosis_file(self, rank: int) -> Path:
        """What one global rank has left when the run was stuck or failed."""
        return self.diagnosis / f"rank-{rank:05d}.json"

    def put_diagnosis_aside(self) -> None:
        """Rename what an earlier start has left to ``diagnosis.previous``, and drop what was there.

        Rank 0 calls this before any rank of this start can write one.

        Raises:
            OSError: if the directory cannot be written.
        """
        if self.diagnosis.exists():
            previous = self.diagnosis.with_suffix(".previous")
            shutil.rmtree(previous, ignore_errors=True)
            os.replace(self.diagnosis, previous)

    def lock(self) -> None:
        """Begin a start: create the directory and hold it for as long as this process lives.

        Only global rank 0 calls this, before any rank can call :meth:`fail`. The kernel releases
        the lock when the process ends, in whatever way.

        Raises:
            ConfigError: in one line, if another job holds the directory or it is not writable.
        """
        if self._lock_fd is not None:
            return
        try:
            for folder in (self.path, self.checkpoints, self.log_file(0).parent):
                folder.mkdir(parents=True, exist_ok=True)
                if not os.access(folder, os.W_OK | os.X_OK):
                    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            # A link may lead to a file that is not ours to write.
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
            fd = os.open(self.lock_file, flags, 0o666)
        except OSError as error:
            if error.errno in (errno.EISDIR, errno.ELOOP):
                raise ConfigError(f"{self.lock_file} is no regular file: remove it") from None
            raise ConfigError(
                f"--run-dir {self.path} is not writable ({error.strerror}): name another directory"
            ) from None
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise ConfigError(f"{self.lock_file} is no regular file: remove it")
            self._take(fd)
        except BaseException:
            os.close(fd)
            raise
        self._lock_fd = fd
        # A forked child shares the lock and would keep it after a kill of this process.
        os.register_at_fork(after_in_child=self.unlock)
        self._failed_marker.unlink(missing_ok=True)

    def join(self) -> None:
        """Hold on to the directory that rank 0 has locked; on the other ranks."""
        with contextlib.suppress(OSError):  # where nodes share no files, there is nothing to hold
            self.unlock()
            self._lock_fd = os.open(self.lock_file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)

    def is_lost(self) -> bool:
        """Whether the path leads elsewhere than to what this start has locked or joined.

        As where the directory was moved, and perhaps another job has begun at its old path.
        """
        if self._lock_fd is None:
            return False
        try:
            return not os.path.samestat(os.fstat(self._lock_fd), os.stat(self.lock_file))
        except OSError as error:
            # Of others, as a disk that fails, a write says more.
            return error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ESTALE)

    def check_held(self) -> None:
        """Raise OSError where :meth:`is_lost`: nothing may be written there."""
        if self.is_lost():
            raise OSError(errno.ESTALE, "the run directory was moved or replaced", str(self.path))

    def _take(self, fd: int) -> None:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                # Some cluster file systems are mounted without locks; the run is possible there.
                logging.getLogger(LOGGER).warning(
                    "%s cannot be locked (%s): start only one job in it", self.path, error.strerror
                )
                return
            holder = os.pread(fd, 1000, 0).decode(errors="replace").split()
            who = f"process {holder[1]} on {holder[0]}" if len(holder) == 2 else "another process"
            raise ConfigError(
                f"--run-dir {self.path} is held by {who}: wait for it, end it, "
                "or name another directory"
            ) from None
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{socket.gethostname()} {os.getpid()}\n".encode(), 0)

    def unlock(self) -> None:
        """Let go of the directory before the process ends."""
        if self._lock_fd is not None:
            # Closing, not LOCK_UN: in a forked child the parent's lock must stay.
            os.close(self._lock_fd)
            self._lock_fd = None

    def check_readable(self) -> None:
        """Check what a start is about to read and rewrite, before it changes anything.

        Raises:
            ConfigError: if the file system does not let it be read, or if it is no file.
        """
        for path in (self.config_toml, self.run_json, self.status_json, *self._logs):
            with readable(path):
                if not stat.S_ISREG(os.stat(path).st_mode):
                    raise ConfigError(f"{path} is no regular file: remove it")
                os.close(os.open(path, os.O_RDONLY))

    def _read_run(self) -> dict | None:
        """run.json; None where there is none, or where no training can have written it."""
        run = read_object(self.run_json)
        return run if run and isinstance(run.get("starts"), list) else None

    def _edit_run(self, edit: Callable[[dict], None]) -> dict:
        """Rewrite run.json; a corrupt one is put aside, since no training depends on it."""
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
            ConfigError: if that cannot be known, as where the permission is missing.
        """
        return checkpoint_dir.newest_checkpoint(self.checkpoints)

    def record_start(self, record: dict) -> None:
        """Append the record of this start to run.json (rank 0)."""
        self._edit_run(lambda run: run["starts"].append(record))

    def starts(self) -> int:
        """How many times this run has been started, as far as the first step or further."""
        return len((self._read_run() or {}).get("starts", ()))

    def begun_by(self, launch_id: str) -> bool:
        """Whether the last start that got as far as changing something was of this launch."""
        last = next(reversed((self._read_run() or {}).get("starts", [])), None)
        ids = last.get("launch") if isinstance(last, dict) else None
        return isinstance(ids, list) and launch_id in ids

    def wandb_id(self, given: str | None = None) -> str:
        """The id of this run on wandb: the same after a resume, a new one in a copied directory.

        ``given`` is the one that the environment asks for; it is that of the run from then on.
        """
        run, here = self._read_run() or {}, str(self.path.resolve())
        same = isinstance(run.get("wandb_id"), str) and run.get("wandb_path") == here
        if not same or given not in (None, "", run["wandb_id"]):
            new = given or "".join(secrets.choice(_ID_LETTERS) for _ in range(10))
            run = self._edit_run(lambda run: run.update(wandb_id=new, wandb_path=here))
        return run["wandb_id"]

    def write_status(self, state: State, **fields) -> None:
        """Say how this start stands (rank 0); a failure that a rank has reported stays.

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

        Never raises, so that it cannot hide the failure that it reports.

        Returns:
            Whether this rank is to speak: its report is in status.json, or nothing can be
            written there.
        """
        try:
            self.check_held()
            os.close(os.open(self._failed_marker, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
            self._write_status("failed", {"rank": rank, "step": step, "error": masked(error)})
        except FileExistsError:
            return False
        except OSError as fault:
            # Nobody else may be able to say it.
            logging.getLogger(LOGGER).error("cannot write %s: %s", self.status_json, fault)
        return True

    def has_failed(self) -> bool:
        """Whether a rank of this start has reported a failure, as far as can be seen."""
        return os.path.lexists(self._failed_marker)

    def read_status(self) -> dict | None:
        """The last status; None if there is none that can be read."""
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

        Rank 0 calls this on a resume: the steps after the checkpoint are about to be done again.

        Raises:
            OSError: if a file cannot be read or written.
            ConfigError: if one is no file that a training can have written.
        """
        for path in self._logs:
            try:
                old = read_bounded(path, _MAX_LOG_BYTES)
            except FileNotFoundError:
                continue
            except ValueError as error:
                raise ConfigError(f"{path} {error}: remove it, or name another --run-dir") from None
            # A kill can come between an object and its newline: then the line is whole, but open.
            lines = [line for line in old.split(b"\n") if _kept(line, step)]
            new = b"".join(line + b"\n" for line in lines)
            if new != old:
                write_atomic(path, new.decode("utf-8"))


class _MaskingFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return masked(super().format(record))


def rank_logger(run_dir: RunDir, rank: int) -> logging.Logger:
    """The logger of this process. It writes to its rank's own file, so that ranks never mix."""
    # A log that cannot be written, on a full disk, must not fill the terminal with its own errors.
    logging.raiseExceptions = False
    logger = logging.getLogger(LOGGER)
    for handler in logger.handlers[:]:
        logger.removeHandler(handler)
        handler.close()
    file = run_dir.log_file(rank)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        handler = logging.FileHandler(file, encoding="utf-8")
    except OSError:
        # What is logged is often that the disk takes nothing more; that must reach the terminal.
        handler = logging.NullHandler()
    line = f"%(asctime)s rank={rank} %(levelname)s %(message)s"
    handler.setFormatter(_MaskingFormatter(line))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    return logger
