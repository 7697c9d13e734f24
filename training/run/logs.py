"""The log file of each rank. Torch-free."""

import logging
from pathlib import Path

from common.secrets import masked

LOGGER = "parallel_recipes"


class _MaskingFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return masked(super().format(record))


def rank_logger(file: Path, rank: int) -> logging.Logger:
    """The logger of this process, which writes to a file of its rank alone, with secrets masked."""
    # An error of the log itself, as on a full disk, must not fill the terminal.
    logging.raiseExceptions = False
    logger = logging.getLogger(LOGGER)
    for handler in logger.handlers[:]:
        logger.removeHandler(handler)
        handler.close()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        handler = logging.FileHandler(file, encoding="utf-8")
    except OSError:
        # Training goes on without a log where the disk takes nothing more.
        handler = logging.NullHandler()
    handler.setFormatter(_MaskingFormatter(f"%(asctime)s rank={rank} %(levelname)s %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    return logger
