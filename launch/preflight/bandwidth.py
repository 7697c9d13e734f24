"""What a preflight measures: the speed of each rank, of each mesh dim, and between nodes.

Bandwidths are bus bandwidths as nccl-tests defines them (doc/PERFORMANCE.md of NVIDIA/nccl-tests):
with S bytes in t seconds over n ranks, S/t * 2(n-1)/n for an all-reduce, S/t * (n-1)/n for an
all-gather (S: its whole output) and a reduce-scatter (S: its whole input). They are comparable
over sizes of groups, and with the speed of the links.
"""

import statistics
import time
import warnings
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from common.text import columns
from launch.preflight.node import Report, listing, rank_list
from parallel.mesh import Ranks

SPEED_ROUNDS = 5
ROUNDS = 20  # of a collective or a message
# A round must be longer than the period with which a scheduler or a cgroup quota throttles, 0.1 s,
# so that the best of some rounds is still that of a throttled rank.
ROUND_S = 0.3
# A rank, group or node below this part of the median is at fault. Ranks on CPUs may share cores.
FLOOR = {"cpu": 0.4, "cuda": 0.85}
BUS_FACTOR = {
    "all-reduce": lambda n: 2 * (n - 1) / n,
    "all-gather": lambda n: (n - 1) / n,
    "reduce-scatter": lambda n: (n - 1) / n,
}


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def local_speed(device: torch.device) -> dict[str, float]:
    """The best of some rounds, all equally long: ``matmul`` in FLOP/s, ``copy`` in bytes/s."""
    cuda = device.type == "cuda"
    n, dtype, numel = (8192, torch.bfloat16, 2**28) if cuda else (256, torch.float32, 2**22)
    a, b = (torch.ones(n, n, dtype=dtype, device=device) for _ in range(2))
    source = torch.ones(numel, device=device)
    target = torch.empty_like(source)
    works = {
        "matmul": (lambda: torch.mm(a, b), 2 * n**3),
        # A copy reads and writes.
        "copy": (lambda: target.copy_(source), 2 * source.nbytes),
    }
    best = dict.fromkeys(works, 0.0)
    for work, _ in works.values():
        work()
    for _ in range(SPEED_ROUNDS):
        for name, (work, amount) in works.items():
            _finish(device)
            started, done = time.monotonic(), 0
            while (passed := time.monotonic() - started) < ROUND_S:
                work()
                _finish(device)
                done += 1
            best[name] = max(best[name], done * amount / passed)
    return best


def _collectives(buffer: torch.Tensor, group: dist.ProcessGroup) -> dict[str, Callable]:
    part = buffer.chunk(dist.get_world_size(group))[dist.get_rank(group)].clone()
    return {
        "all-reduce": lambda: dist.all_reduce(buffer, group=group),
        "all-gather": lambda: dist.all_gather_into_tensor(buffer, part, group=group),
        "reduce-scatter": lambda: dist.reduce_scatter_tensor(part, buffer, group=group),
    }


def _best_time(work: Callable, ranks: Ranks) -> float:
    best = float("inf")
    for i in range(ROUNDS + 1):
        _finish(ranks.device)
        started = time.monotonic()
        work()
        _finish(ranks.device)
        if i:  # the first one connects
            best = min(best, time.monotonic() - started)
    return best


def mesh_speed(ranks: Ranks, mib: int, at: Callable[[str], None]) -> list[tuple]:
    """Time collectives along each mesh dim, on all groups of a dim at once, as in training.

    Args:
        mib: size S of a message, in MiB.
        at: called before each collective with its name, for the message about a hang.

    Returns:
        (dim, collective, ranks of the group, bytes/s), the best of some rounds of this rank. Only
        the first rank of a group lists all of its ranks; the others list that first rank.
    """
    rows = []
    for dim, n in zip(ranks.mesh.mesh_dim_names, ranks.mesh.shape, strict=True):
        if n == 1:
            continue
        group = ranks.mesh.get_group(dim)
        members = dist.get_process_group_ranks(group)
        listed = members if ranks.rank == members[0] else members[:1]
        numel = mib * 2**20 // 4 // n * n
        buffer = torch.zeros(numel, device=ranks.device)
        for name, work in _collectives(buffer, group).items():
            at(f"{name} over {dim}")
            dist.barrier(ranks.control)
            with warnings.catch_warnings():
                # torch 2.13 wants names that older versions lack.
                warnings.simplefilter("ignore", FutureWarning)
                seconds = _best_time(work, ranks)
            rows.append((dim, name, listed, buffer.nbytes / seconds * BUS_FACTOR[name](n)))
    return rows


def ring_rounds(n: int) -> list[list[tuple[int, int]]]:
    """Pairs of neighbours in a ring of ``n`` nodes, in rounds in which a node has one partner."""
    pairs = [(i, (i + 1) % n) for i in range(n if n > 2 else n - 1)]
    last = [pairs.pop()] if n % 2 and n > 1 else []
    return [chosen for chosen in (pairs[::2], pairs[1::2], last) if chosen]


def node_speed(
    ranks: Ranks, leaders: list[int], mib: int, at: Callable[[str], None]
) -> list[tuple]:
    """Send a message to and fro between neighbouring nodes, one rank each.

    Args:
        leaders: a global rank of each node.

    Returns:
        (rank, rank, bytes/s) of the pairs in which this rank was the first.
    """
    rows = []
    buffer = torch.zeros(mib * 2**18, device=ranks.device)
    for i, pairs in enumerate(ring_rounds(len(leaders))):
        at(f"messages between nodes, round {i + 1}")
        dist.barrier(ranks.control)
        for pair in pairs:
            first, second = (leaders[node] for node in pair)
            if ranks.rank == first:

                def work(peer: int = second) -> None:
                    dist.send(buffer, peer)
                    dist.recv(buffer, peer)

                rows.append((first, second, 2 * buffer.nbytes / _best_time(work, ranks)))
            elif ranks.rank == second:
                for _ in range(ROUNDS + 1):
                    dist.recv(buffer, first)
                    dist.send(buffer, first)
    return rows


def judge_speed(
    report: Report, speeds: dict[int, dict[str, float]], host: dict[int, str], floor: float
) -> dict[str, float]:
    """Name the ranks, or the nodes, that are slower than the others.

    Args:
        speeds: :func:`local_speed` by rank. host: name of the node by rank.
        floor: part of the median below which a rank is at fault.

    Returns:
        By node, the speed of its slowest rank as a part of the median.
    """
    units = {"matmul": ("matrix multiplication", "GFLOP/s"), "copy": ("copy", "GB/s")}
    texts, parts, slow = [], {}, {}
    for key, (what, unit) in units.items():
        values = {rank: speed[key] for rank, speed in speeds.items()}
        median = statistics.median(values.values())
        for rank, value in values.items():
            parts[host[rank]] = min(parts.get(host[rank], 1.0), value / median)
            if value < floor * median:
                text = f"{what} at {value / 1e9:.1f} {unit}, {value / median:.0%} of the median"
                slow.setdefault(host[rank], {}).setdefault(rank, []).append(text)
        least = min(values, key=values.get)
        texts.append(
            f"{what} {median / 1e9:.1f} {unit}, least {values[least] / 1e9:.1f} "
            f"({values[least] / median:.0%}, rank {least} on {host[least]})"
        )
    report.say(f"speed of a rank, median: {'; '.join(texts)}")
    for node, by_rank in slow.items():
        ranks_there = [rank for rank in speeds if host[rank] == node]
        who = rank_list(list(by_rank)) if len(by_rank) < len(ranks_there) else "every rank"
        report.fault(
            f"slow: {who} on {node} ({'; '.join(next(iter(by_rank.values())))}): look for another "
            "process on that CPU or GPU, a CPU quota, heat or a power limit"
        )
    return parts


def judge_mesh(
    report: Report, rows_of_ranks: list[list[tuple]], host: dict[int, str], floor: float
) -> None:
    """Print a row for each dim and collective, and name the groups that are slower than others.

    Args:
        rows_of_ranks: what :func:`mesh_speed` returned on each rank.
    """
    groups: dict[tuple, dict[int, float]] = {}
    members: dict[tuple, list[int]] = {}
    for dim, name, listed, speed in (row for rows in rows_of_ranks for row in rows):
        # A group is as fast as its slowest member saw it.
        speeds = groups.setdefault((dim, name), {})
        speeds[listed[0]] = min(speeds.get(listed[0], speed), speed)
        members[dim, listed[0]] = max(members.get((dim, listed[0]), listed), listed, key=len)
    table = [("dim", "collective", "ranks", "median busbw", "least", "slowest group")]
    for (dim, name), speeds in groups.items():
        median, slowest = statistics.median(speeds.values()), min(speeds, key=speeds.get)
        group = members[dim, slowest]
        who = _group(group, host)
        table.append((dim, name, len(group), _gb(median), _gb(speeds[slowest]), who))
        if speeds[slowest] < floor * median:
            report.fault(
                f"{name} over {dim} is slow among {who}: {_gb(speeds[slowest])}, "
                f"{speeds[slowest] / median:.0%} of the median {_gb(median)}: check their links "
                "(nvidia-smi nvlink -s, ibstat), and ranks that are slow by themselves"
            )
    for line in columns(table) if groups else ():
        report.say(line)


def judge_nodes(
    report: Report, rows_of_ranks: list[list[tuple]], host: dict[int, str], floor: float
) -> dict[str, float]:
    """Print the speed between nodes, and name those that are slow with each neighbour.

    Args:
        rows_of_ranks: what :func:`node_speed` returned on each rank.

    Returns:
        By node, the best speed with a neighbour as a part of the median.
    """
    best: dict[str, float] = {}
    pairs = {}
    for first, second, speed in (row for rows in rows_of_ranks for row in rows):
        pairs[first, second] = speed
        for rank in (first, second):
            best[host[rank]] = max(best.get(host[rank], 0.0), speed)
    if not pairs:
        return {}
    slowest, median = min(pairs, key=pairs.get), statistics.median(pairs.values())
    table = [
        ("between", "message", "ranks", "median", "least", "slowest pair"),
        ("node", "send", 2, _gb(median), _gb(pairs[slowest]), _group(slowest, host)),
    ]
    for line in columns(table):
        report.say(line)
    usual = statistics.median(best.values())
    for node, speed in best.items():
        if speed < floor * usual:
            report.fault(
                f"{node} is slow with each of its neighbours: {_gb(speed)} at best, "
                f"{speed / usual:.0%} of the median {_gb(usual)}: check its network card, cable "
                "and switch port"
            )
    return {node: speed / usual for node, speed in best.items()}


def _gb(speed: float) -> str:
    return f"{speed / 1e9:.2f} GB/s"


def _group(members: Sequence[int], host: dict[int, str]) -> str:
    return f"{rank_list(members)} on {listing(list(dict.fromkeys(host[r] for r in members)))}"
