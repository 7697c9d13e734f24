"""A directory that one job at a time may use. Torch-free."""

import contextlib
import errno
import fcntl
import logging
import os
import socket
import stat
from pathlib import Path

from common.errors import ConfigError
from training.run.logs import LOGGER


class LockedDirectory:
    """A directory with a lock file; making the object touches nothing on disk."""

    def __init__(self, path: Path):
        self.path = Path(path)
        self.lock_file = self.path / ".lock"
        self._lock_fd: int | None = None

    def lock(self) -> None:
        """Lock the directory, which exists, until this process ends, in whatever way.

        Raises:
            ConfigError: in one line, if another job has locked it or it is not writable.
        """
        if self._lock_fd is not None:
            return
        try:
            # A link may lead to a file that is not ours to write.
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
            fd = os.open(self.lock_file, flags, 0o666)
        except OSError as error:
            if error.errno in (errno.EISDIR, errno.ELOOP):
                raise ConfigError(f"{self.lock_file} is no regular file: remove it") from None
            raise self._not_writable(error) from None
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise ConfigError(f"{self.lock_file} is no regular file: remove it")
            self._flock(fd)
        except BaseException:
            os.close(fd)
            raise
        self._lock_fd = fd
        # A forked child shares the lock and would keep it after a kill of this process.
        os.register_at_fork(after_in_child=self.unlock)

    def _not_writable(self, error: OSError) -> ConfigError:
        return ConfigError(
            f"--run-dir {self.path} is not writable ({error.strerror}): name another directory"
        )

    def _flock(self, fd: int) -> None:
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

    def join(self) -> None:
        """Remember which directory rank 0 has locked; called on the other ranks."""
        with contextlib.suppress(OSError):  # nodes without shared files have no lock file
            self.unlock()
            self._lock_fd = os.open(self.lock_file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)

    def is_lost(self) -> bool:
        """Whether the path leads to another directory than this start has locked or joined.

        That is so where the directory was moved, and perhaps another job has begun at its old path.
        """
        if self._lock_fd is None:
            return False
        try:
            return not os.path.samestat(os.fstat(self._lock_fd), os.stat(self.lock_file))
        except OSError as error:
            # The next write says more about any other error, such as a failing disk.
            return error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ESTALE)

    def check_held(self) -> None:
        """Raise OSError where :meth:`is_lost`: nothing may be written there."""
        if self.is_lost():
            raise OSError(errno.ESTALE, "the run directory was moved or replaced", str(self.path))

    def unlock(self) -> None:
        """Release the directory before the process ends."""
        if self._lock_fd is not None:
            # Closing, not LOCK_UN: in a forked child the parent's lock must stay.
            os.close(self._lock_fd)
            self._lock_fd = None
