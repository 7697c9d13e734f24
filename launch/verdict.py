"""Who waits for whom in which collective, from what the ranks have left. Torch-free."""

from dataclasses import dataclass, field

from training.run_dir import rank_ranges

MAX_LINES, UNKNOWN = 8, "unknown"
# Collectives whose tensors must have the same size on all ranks.
SAME_SIZE = ("all_reduce", "allreduce", "all_gather", "allgather", "reduce_scatter", "broadcast")
# Frames of the machinery that reports, not of the training.
REPORTING = ("training/diagnosis.py", "training/heartbeat.py", "training/ending.py")


@dataclass
class Left:
    """What the ranks of one start have left.

    Attributes:
        records: by rank, the diagnosis that it has written.
        beats: of every rank the last :class:`training.heartbeat.Beat`, or nothing.
        hosts: the ranks on each host, as in run.json.
        broken: names of files that cannot be read.
        crashes: by rank, what the interpreter wrote into its log when it crashed.
    """

    records: dict[int, dict]
    beats: list[list]
    world_size: int
    hosts: dict[str, str]
    broken: list[str]
    crashes: dict[int, str] = field(default_factory=dict)

    @property
    def silent(self) -> list[int]:
        """Ranks without a diagnosis."""
        return [rank for rank in range(self.world_size) if rank not in self.records]

    @property
    def raised(self) -> dict[int, dict]:
        """Records of ranks that raised an error of their own, the first one first."""
        found = {r: x for r, x in self.records.items() if "error" in x and not x["lost_peer"]}
        return dict(sorted(found.items(), key=lambda item: item[1]["time"]))

    def silent_beats(self) -> dict[int, tuple[str, int | None, str]]:
        """Host, last step and last phase of the ranks without a diagnosis, as far as known."""
        hosts = {rank: host for host, ranks in self.hosts.items() for rank in ranks_in(ranks)}
        found = {}
        for rank in self.silent:
            if rank in self.crashes:
                continue
            if rank < len(self.beats):
                _, moves, step, phase, host = self.beats[rank]
                found[rank] = (host, step if moves >= 0 else None, phase)
            else:
                found[rank] = (hosts.get(rank, "an unknown host"), None, "")
        return found

    def last_number(self, rank: int, group: tuple[str, str]) -> int:
        """The number of a rank's last collective of a group (dim, members); 0 if none is known."""
        groups = self.records[rank]["groups"].values() if rank in self.records else ()
        return max((g["last"] for g in groups if (g["dim"], g["ranks"]) == group), default=0)


def ranks_in(text: str) -> set[int]:
    """The ranks of a text like ``0-3, 7``."""
    found = set()
    for part in filter(None, text.split(", ")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return found


def named(ranks: list[int], capital: bool = False) -> str:
    """``rank 3`` or ``ranks 0-2, 4``."""
    word = "rank" if len(ranks) == 1 else "ranks"
    return f"{word.capitalize() if capital else word} {rank_ranges(ranks)}"


def current(record: dict) -> dict | None:
    """The collective that a rank is in, or was in last; None if none is recorded."""
    found = record["collectives"] or []
    unfinished = [entry for entry in found if entry["state"] != "completed"]
    if not unfinished:
        return found[-1] if found else None
    # On a GPU they are queued, and the oldest holds up the others. Gloo's caller waits for each,
    # but for those that it has started to wait for later.
    return unfinished[0 if unfinished[-1]["op"].startswith("nccl") else -1]


def collective_text(record: dict, entry: dict | None) -> str:
    """A collective in a few words: dim, op, number, state, sizes."""
    if entry is None:
        return "not recorded" if record["collectives"] is None else "none"
    sizes = ", ".join(str(size) for size in entry["sizes"][0][:2])
    more = ", ..." if len(entry["sizes"][0]) > 2 else ""
    dim = record["groups"][entry["group"]]["dim"]
    return f"{dim} {_op(entry)} {entry['number']} {entry['state']} {sizes}{more}".rstrip()


def where(record: dict) -> str:
    """The innermost frame of our code in the main thread."""
    frames = record["threads"][0]["frames"] if record["threads"] else []
    for frame in frames:
        if not frame.startswith(("/", "<", *REPORTING)):
            return frame
    return frames[0] if frames else "unknown"


def _op(entry: dict) -> str:
    return entry["op"].partition(":")[2] or entry["op"]


def _group(record: dict, entry: dict) -> tuple[str, str]:
    """Dim and members: the name of a group means nothing on another rank."""
    group = record["groups"][entry["group"]]
    return group["dim"], group["ranks"] or UNKNOWN


def waits(left: Left) -> list[str]:
    """A line for each collective that ranks wait in: who waits, and who has not joined it."""
    waiting: dict[tuple, list[int]] = {}
    for rank, record in left.records.items():
        entry = current(record)
        if entry and entry["state"] != "completed" and rank not in left.raised:
            number = None if entry["p2p"] else entry["number"]
            waiting.setdefault((*_group(record, entry), _op(entry), number), []).append(rank)
    # Groups of one dim at the same place are one line: on 4096 ranks there are hundreds.
    merged: dict[tuple, tuple[list[str], list[int], list[int]]] = {}
    for (dim, members, op, number), ranks in waiting.items():
        groups, waiters, absent = merged.setdefault((dim, op, number), ([], [], []))
        groups.append(members)
        waiters += ranks
        if number is not None and members != UNKNOWN:
            others = ranks_in(members) - set(ranks)
            behind = {r for r in others if left.last_number(r, (dim, members)) < number}
            absent += behind
    lines = []
    for (dim, op, number), (groups, waiters, absent) in merged.items():
        of = f"ranks {groups[0]}" if len(groups) == 1 else f"{len(groups)} groups"
        verb = "waits" if len(waiters) == 1 else "wait"
        line = f"{named(waiters, capital=True)} {verb} in {op} of {dim} ({of})"
        if number is not None:
            verb = "has" if len(absent) == 1 else "have"
            joined = f"{named(absent)} {verb} not joined" if absent else "all have joined"
            line += f", number {number}, which {joined}"
        lines.append(line + ".")
    more = len(lines) - MAX_LINES
    return lines[:MAX_LINES] + ([f"... and {more} more collectives."] if more > 0 else [])


def desyncs(left: Left) -> list[str]:
    """A line for each group whose ranks called different collectives under the same number."""
    called: dict[tuple, dict[int, dict[int, list[dict]]]] = {}
    for rank, record in left.records.items():
        for entry in record["collectives"] or []:
            if not entry["p2p"]:
                by_number = called.setdefault(_group(record, entry), {})
                by_number.setdefault(entry["number"], {}).setdefault(rank, []).append(entry)
    lines = []
    for (dim, members), by_number in called.items():
        for number, by_rank in sorted(by_number.items()):
            kinds: dict[frozenset, list[int]] = {}
            for rank, entries in by_rank.items():
                kinds.setdefault(frozenset(map(_signature, entries)), []).append(rank)
            first, *others = kinds
            # A coalesced call has several entries of one number, some of which may be cut off.
            if all(first & other for other in others):
                continue
            calls = [f"{named(who)} called {', '.join(sorted(k))}" for k, who in kinds.items()]
            where = f"{dim} (ranks {members}), number {number}"
            lines.append(f"DESYNC in {where}: {'; '.join(calls)}.")
            break
    more = len(lines) - MAX_LINES
    return lines[:MAX_LINES] + ([f"... and {more} more groups."] if more > 0 else [])


def _signature(entry: dict) -> str:
    """What must be the same on all ranks of a collective."""
    op = _op(entry)
    if not any(word in op for word in SAME_SIZE):
        return op
    sizes = ", ".join(map(str, entry["sizes"][0]))
    return f"{op} of {sizes} {'/'.join(sorted(set(entry['dtypes'])))}".rstrip()
