"""What a preflight asks of a node, and its judgement of the answers. Torch-free until asked.

The functions named ``judge_*`` run on rank 0 and are pure: answers in, sentences out.
"""

import contextlib
import hashlib
import platform
import resource
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import reduce
from importlib.metadata import PackageNotFoundError, version
from operator import or_
from pathlib import Path

from common.files import REPO
from common.text import bytes_of

SHM_LEAST = 2**30  # bytes; NCCL puts some 10 MB a rank there, and Docker's default is 64 MB
# Each rank holds a connection to all others in two gloo groups (the default and the control one).
GROUPS = 2
FILES_BESIDE = 512  # open files of a rank that are no connections


@dataclass
class Report:
    """What rank 0 reports; a line of ``say`` is printed at once, faults and warnings at the end."""

    faults: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    say: Callable[[str], None] = print

    def fault(self, sentence: str) -> None:
        """Note what must be repaired before the job can train."""
        self.faults.append(sentence)

    def warn(self, sentence: str) -> None:
        """Note what may be intended."""
        self.warnings.append(sentence)


def listing(names: list[str], most: int = 3) -> str:
    """``a, b and 5 more``."""
    shown = list(names) if len(names) <= most + 1 else [*names[:most], f"{len(names) - most} more"]
    return " and ".join([", ".join(shown[:-1]), shown[-1]] if len(shown) > 1 else shown)


def rank_list(ranks: Sequence[int], most: int = 3) -> str:
    """``rank 3``, or ``ranks 0, 1, 2 and 5 more``."""
    return f"rank{'s' if len(ranks) > 1 else ''} {listing([str(rank) for rank in ranks], most)}"


def count(n: int, what: str) -> str:
    """``1 node`` or ``2 nodes``."""
    return f"{n} {what}{'' if n == 1 else 's'}"


def judge_equal(report: Report, what: str, values: dict[str, object], fix: str) -> None:
    """Name the nodes or GPUs whose value differs from the most frequent one (of two, the first).

    Args:
        values: by name of the node or GPU.
    """
    usual = Counter(values.values()).most_common(1)[0][0]
    rest = [name for name, value in values.items() if value == usual]
    for value in dict.fromkeys(values.values()):
        if value != usual:
            odd = listing([name for name, other in values.items() if other == value])
            report.fault(f"{what} is {value} on {odd}, but {usual} on {listing(rest)}: {fix}")


# --- versions -----------------------------------------------------------------------------------


def _installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _git(*words: str) -> bytes:
    return subprocess.run(
        ["git", "-C", str(REPO), *words], capture_output=True, check=True, timeout=30
    ).stdout


def code_version() -> str:
    """The commit of this code, and a hash of what differs from it: equal where the code is."""
    try:
        commit, changes = _git("rev-parse", "HEAD").decode().strip(), _git("diff", "HEAD")
    except (OSError, subprocess.SubprocessError):
        return "in no git repository"
    if not changes:
        return f"commit {commit[:12]}"
    return f"commit {commit[:12]} with changes {hashlib.sha256(changes).hexdigest()[:8]}"


def versions(driver: str, config: str) -> dict[str, str]:
    """What must be the same on all nodes, by name.

    Args:
        driver: version of the NVIDIA driver.
        config: the resolved config as text.
    """
    import torch

    cuda = torch.cuda.is_available()
    return {
        "Python": platform.python_version(),
        "torch": str(torch.__version__),
        "CUDA": str(torch.version.cuda or "none"),
        "NCCL": ".".join(map(str, torch.cuda.nccl.version())) if cuda else "none",
        "NVIDIA driver": driver,
        "numpy": _installed("numpy"),
        "transformers": _installed("transformers"),
        "the code": code_version(),
        "the config": hashlib.sha256(config.encode()).hexdigest()[:8],
    }


def judge_versions(report: Report, by_node: dict[str, dict[str, str]]) -> None:
    """Compare :func:`versions` by node."""
    first = next(iter(by_node.values()))
    fixes = {
        "the code": "check out the same commit on all nodes",
        "the config": "use the same flags and recipe file on all nodes",
        "NVIDIA driver": "install the same driver on all nodes, or leave the node out",
    }
    before = len(report.faults)
    for what in first:
        values = {node: own[what] for node, own in by_node.items()}
        judge_equal(report, what, values, fixes.get(what, "install the same version on all nodes"))
    differ = len(report.faults) > before
    verdict = f"differ, on {next(iter(by_node))}" if differ else "the same on all nodes"
    listed = ", ".join(f"{what.removeprefix('the ')} {value}" for what, value in first.items())
    report.say(f"versions: {verdict}: {listed}")


# --- limits -------------------------------------------------------------------------------------


def limits() -> dict[str, float]:
    """Files that this process may open, bytes that it may lock and dump, bytes of /dev/shm."""

    def soft(which: int) -> float:
        value = resource.getrlimit(which)[0]
        return float("inf") if value == resource.RLIM_INFINITY else value

    shm = shutil.disk_usage("/dev/shm") if Path("/dev/shm").is_dir() else None
    return {
        "files": soft(resource.RLIMIT_NOFILE),
        "memlock": soft(resource.RLIMIT_MEMLOCK),
        "core": soft(resource.RLIMIT_CORE),
        "shm_total": shm.total if shm else 0,
        "shm_free": shm.free if shm else 0,
    }


def _limit(size: float) -> str:
    return "unlimited" if size == float("inf") else bytes_of(size)


def judge_limits(
    report: Report, by_node: dict[str, dict[str, float]], world_size: int, gpus: bool
) -> None:
    """Compare :func:`limits` by node with what a job of ``world_size`` ranks needs."""
    needed = GROUPS * world_size + FILES_BESIDE
    low = [node for node, own in by_node.items() if own["files"] < needed]
    if low:
        report.fault(
            f"a process may open {by_node[low[0]]['files']:.0f} files on {listing(low)}, and "
            f"{world_size} ranks need about {needed}: raise 'ulimit -n' where the job is started"
        )
    low = [node for node, own in by_node.items() if own["memlock"] != float("inf")]
    if gpus and low:
        report.warn(
            f"a process may lock {_limit(by_node[low[0]]['memlock'])} of memory on {listing(low)}: "
            "InfiniBand needs 'ulimit -l unlimited' (LimitMEMLOCK of slurmd or the container)"
        )
    low = [node for node, own in by_node.items() if own["shm_free"] < SHM_LEAST]
    if low:
        report.warn(
            f"/dev/shm has {bytes_of(by_node[low[0]]['shm_free'])} free on {listing(low)}, and "
            "ranks of a node meet there: enlarge it (--shm-size of a container), or clear it"
        )
    names = next(iter(by_node.values()))
    least = {name: min(own[name] for own in by_node.values()) for name in names}
    report.say(
        f"limits, the least of all nodes: {least['files']:.0f} open files, locked memory "
        f"{_limit(least['memlock'])}, core files {_limit(least['core'])}, /dev/shm "
        f"{bytes_of(least['shm_total'])} with {bytes_of(least['shm_free'])} free"
    )


def judge_cores(report: Report, masks: dict[str, list[int]], gpus: bool) -> None:
    """Compare the cores that the ranks of a node may use, a bit each, with the number of ranks."""
    cores = {node: reduce(or_, ranks).bit_count() for node, ranks in masks.items()}
    few = [node for node, ranks in masks.items() if cores[node] < len(ranks)]
    if few:
        (report.fault if gpus else report.warn)(
            f"{len(masks[few[0]])} ranks share {count(cores[few[0]], 'CPU core')} on "
            f"{listing(few)}: ask for more (--cpus-per-task of Slurm)"
        )


# --- run directory ------------------------------------------------------------------------------


def make_probe(run_dir: Path, token: str) -> tuple[str | None, list[Path]]:
    """Create a probe below the run directory, and the directory where it is missing (rank 0).

    Returns:
        What went wrong, or None; and what to remove afterwards, in order.
    """
    created = [path for path in (run_dir, *run_dir.parents) if not path.exists()]
    probe = run_dir / f".preflight-{token}"
    try:
        probe.mkdir(parents=True)
        (probe / "leader").write_text(token)
    except OSError as error:
        return f"{error.filename}: {error.strerror}", [probe, *created]
    return None, [probe, *created]


def remove_probe(paths: list[Path]) -> None:
    """Remove what :func:`make_probe` created; a directory that others have written to stays."""
    shutil.rmtree(paths[0], ignore_errors=True)
    for path in paths[1:]:
        with contextlib.suppress(OSError):
            path.rmdir()


def _seen(path: Path, text: str, patience: float) -> bool:
    deadline = time.monotonic() + patience
    while True:
        with contextlib.suppress(OSError):
            if path.read_text() == text:
                return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)


def answer_probe(run_dir: Path, token: str, name: str, patience: float) -> dict:
    """Look for rank 0's probe from this node, and write a file of this node beside it.

    Args:
        patience: seconds that a network file system may take to show it.
    """
    probe, path = run_dir / f".preflight-{token}", str(run_dir.absolute())
    if not _seen(probe / "leader", token, patience):
        return {"path": path, "fault": "unseen", "exists": run_dir.is_dir()}
    try:
        (probe / name).write_text(token)
    except OSError as error:
        return {"path": path, "fault": error.strerror}
    return {"path": path, "fault": None}


def judge_run_dir(
    report: Report, run_dir: Path, token: str, answers: dict[str, dict], patience: float
) -> None:
    """Name nodes that do not share the run directory, from :func:`answer_probe` by node."""
    before, probe = len(report.faults), run_dir / f".preflight-{token}"
    deadline = time.monotonic() + patience
    here = str(run_dir.absolute())
    for node, answer in answers.items():
        path = answer["path"]
        if answer["fault"] == "unseen":
            what = "does not show there what rank 0 writes" if answer["exists"] else "is missing"
            report.fault(
                f"run directory {path} {what} on {node}: mount the same file system on all nodes, "
                f"or name a shared one with --run-dir (on rank 0 it is {here})"
            )
        elif answer["fault"]:
            report.fault(
                f"run directory {path} is not writable on {node} ({answer['fault']}): mount it "
                "read-write, and give the user of the job the right to write"
            )
        elif not _seen(probe / node, token, deadline - time.monotonic()):
            report.fault(f"run directory {here}: rank 0 does not see what {node} writes there")
    if len(report.faults) == before:
        report.say(f"run directory: {here} is shared and writable on {count(len(answers), 'node')}")


def judge_space(report: Report, free: int, parameters: int) -> None:
    """Compare free bytes with two checkpoints: weights and two moments, 4 bytes a number each."""
    needed = 2 * parameters * (4 + 4 + 4)
    text = (
        f"{bytes_of(free)} free, and two checkpoints of {parameters:,} parameters take "
        f"{bytes_of(needed)}"
    )
    report.say(f"disk: {text}")
    if free < needed:
        report.warn(f"the run directory has {text}: make room, or name another with --run-dir")
