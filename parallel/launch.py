"""This process among those of its launcher: torchrun, srun, or alone. Torch-free."""

import os
import re
from dataclasses import dataclass

from common.errors import LayoutError
from common.text import printable


@dataclass(frozen=True)
class Launch:
    """This process among all processes of the job, as the launcher describes it."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int


def read_launch(environ=os.environ) -> Launch:
    """Read the launcher's variables: torchrun's, else those of an ``srun`` step, else one process.

    Raises:
        LayoutError: if torchrun's variables are incomplete or contradict each other.
    """
    if "WORLD_SIZE" in environ or "RANK" in environ:
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        defaults = {
            "LOCAL_RANK": environ.get("RANK"),
            "LOCAL_WORLD_SIZE": environ.get("WORLD_SIZE"),
        }
    elif environ.get("SLURM_STEP_NUM_TASKS", "1") != "1":
        names = (
            "SLURM_PROCID",
            "SLURM_STEP_NUM_TASKS",
            "SLURM_LOCALID",
            "SLURM_STEP_TASKS_PER_NODE",
        )
        defaults = {}
    else:
        return Launch(0, 1, 0, 1)
    try:
        # SLURM writes tasks per node as "4(x2)" or "4,3"; a number is enough for a warning.
        values = [environ.get(n, defaults.get(n)).split("(")[0].split(",")[0] for n in names]
        launch = Launch(*map(int, values))
    except (AttributeError, ValueError):
        given = ", ".join(f"{n}={environ.get(n)}" for n in names)
        raise LayoutError(
            f"launcher variables are incomplete ({given}): start with torchrun or srun"
        ) from None
    if not 0 <= launch.rank < launch.world_size:
        raise LayoutError(f"{names[0]}={launch.rank} is outside {names[1]}={launch.world_size}")
    # SLURM's tasks per node differ between nodes, and only the first node's are known here.
    if names[0] == "RANK":
        local, local_world = launch.local_rank, launch.local_world_size
        if not 0 <= local < local_world <= launch.world_size:
            raise LayoutError(
                f"LOCAL_RANK={local}, LOCAL_WORLD_SIZE={local_world} and "
                f"WORLD_SIZE={launch.world_size} contradict each other: start with torchrun or srun"
            )
        absent = [n for n in ("MASTER_ADDR", "MASTER_PORT") if not environ.get(n)]
        if launch.world_size > 1 and absent:
            raise LayoutError(f"{' and '.join(absent)} not set: start with torchrun or srun")
    if launch.world_size > 1:
        # Under srun a port that is not set is derived from the other two.
        own = names[0] == "RANK"
        for name in ("MASTER_PORT",) if own else ("MASTER_PORT", "SLURM_JOB_ID", "SLURM_STEP_ID"):
            _check_number(environ, name, (1, 65535) if name == "MASTER_PORT" else (0, 2**32))
    return launch


def _check_number(environ, name: str, limits: tuple[int, int]) -> None:
    text, (low, high) = environ.get(name), limits
    if text is None or (re.fullmatch("[0-9]{1,10}", text) and low <= int(text) <= high):
        return
    raise LayoutError(
        f"{name}={printable(text)} is no number from {low} to {high}: "
        "start with torchrun or srun, which set it"
    )
