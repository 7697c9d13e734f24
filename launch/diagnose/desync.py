"""Who waits for whom in which collective, from the post-mortems of the ranks. Torch-free."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from common.text import rank_ranges
from training.run.waiting import UNKNOWN, current, group_of, last_number, ranks_in, waits

MAX_LINES = 8
# Collectives whose tensors must have the same size on all ranks.
SAME_SIZE = ("all_reduce", "allreduce", "all_gather", "allgather", "reduce_scatter", "broadcast")
# Frames of the machinery that reports, not of the training.
REPORTING = ("training/run/diagnosis.py", "training/run/heartbeat.py", "training/run/shutdown.py")


@dataclass
class PostMortem:
    """The post-mortem of one start: what each rank has written, and what else is on record.

    Attributes:
        records: by rank, the diagnosis that the rank has written.
        beats: the last :class:`training.run.heartbeat.Beat` of every rank, or nothing.
        hosts: the ranks on each host, as in run.json.
        broken: names of files that cannot be read.
        crashes: by rank, what the interpreter wrote into the log of the rank when it crashed.
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
        raised = {r: x for r, x in self.records.items() if "error" in x and not x["lost_peer"]}
        return dict(sorted(raised.items(), key=lambda item: item[1]["time"]))

    def silent_beats(self) -> dict[int, tuple[str, int | None, str]]:
        """Host, last step and last phase of the ranks without a diagnosis, as far as known."""
        hosts = {rank: host for host, ranks in self.hosts.items() for rank in ranks_in(ranks)}
        last_seen = {}
        for rank in self.silent:
            if rank in self.crashes:
                continue
            if rank < len(self.beats):
                _, moves, step, phase, host = self.beats[rank][:5]
                last_seen[rank] = (host, step if moves >= 0 else None, phase)
            else:
                last_seen[rank] = (hosts.get(rank, "an unknown host"), None, "")
        return last_seen

    def last_number(self, rank: int, group: tuple[str, str]) -> int:
        """The number of a rank's last collective of a group (dim, members); 0 if none is known."""
        return last_number(self.records[rank], group) if rank in self.records else 0


def named(ranks: list[int], capital: bool = False) -> str:
    """``rank 3`` or ``ranks 0-2, 4``."""
    word = "rank" if len(ranks) == 1 else "ranks"
    return f"{word.capitalize() if capital else word} {rank_ranges(ranks)}"


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


def verdict(post_mortem: PostMortem) -> list[str]:
    """Who called different collectives, who waits in which, and whom they wait for."""
    lines, absent, raised, mismatches = [], set(), post_mortem.raised, _mismatches(post_mortem)
    for (dim, members, number), kinds in list(mismatches.items())[:MAX_LINES]:
        calls = [f"{named(ranks)} called {', '.join(sorted(kind))}" for kind, ranks in kinds]
        lines.append(f"DESYNC in {dim} (ranks {members}), number {number}: {'; '.join(calls)}.")
    waiting = _waiting(post_mortem, mismatches, raised)
    for (dim, op, number, _), (groups, ranks, behind) in list(waiting.items())[:MAX_LINES]:
        of = f"ranks {groups[0]}" if len(groups) == 1 else f"{len(groups)} groups"
        verb = "waits" if len(ranks) == 1 else "wait"
        line = f"{named(ranks, capital=True)} {verb} in {op} of {dim} ({of})"
        if number is not None:
            line += f", number {number}"
        if behind:
            line += f", which {named(behind)} {'has' if len(behind) == 1 else 'have'} not joined"
        lines.append(line + ".")
        absent.update(behind)
    if len(waiting) > MAX_LINES:
        lines.append(f"... and {len(waiting) - MAX_LINES} more collectives.")
    stuck = {rank for _, ranks, _ in waiting.values() for rank in ranks}
    others = sorted(post_mortem.records.keys() - stuck - raised.keys())
    if neighbours := [rank for rank in others if waits(post_mortem.records[rank])]:
        verb = "waits" if len(neighbours) == 1 else "wait"
        lines.append(f"{named(neighbours, capital=True)} {verb} for a neighbour in the pipeline.")
        absent.update(others)
        stuck.update(neighbours)
    idle = [r for r in sorted(absent - stuck) if r in post_mortem.records and r not in raised]
    for place, ranks in alike(idle, lambda rank: where(post_mortem.records[rank])):
        verb = "is" if len(ranks) == 1 else "are"
        lines.append(f"{named(ranks, capital=True)} {verb} in no collective, but at {place}.")
    return lines


def alike(ranks: Iterable[int], key: Callable[[int], Any]) -> list[tuple[Any, list[int]]]:
    """Ranks of equal ``key`` together, in the order in which they come."""
    groups: dict[Any, list[int]] = {}
    for rank in ranks:
        groups.setdefault(key(rank), []).append(rank)
    return list(groups.items())


def _waiting(
    post_mortem: PostMortem, mismatches: dict, raised: dict
) -> dict[tuple, tuple[list[str], list[int], list[int]]]:
    """By dim, op, number and whether somebody is missing: groups, who waits, who has not joined.

    Groups of one dim at the same place are one: on 4096 ranks there are hundreds.
    """
    merged: dict[tuple, tuple[list[str], list[int], list[int]]] = {}
    waiting: dict[tuple, list[int]] = {}
    for rank, record in post_mortem.records.items():
        entry = current(record)
        if entry and entry["state"] != "completed" and rank not in raised:
            number = None if entry["p2p"] else entry["number"]
            waiting.setdefault((*group_of(record, entry), _op(entry), number), []).append(rank)
    for (dim, members, op, number), ranks in waiting.items():
        behind = []
        if number is not None and members != UNKNOWN:
            others = sorted(ranks_in(members) - set(ranks))
            behind = [r for r in others if post_mortem.last_number(r, (dim, members)) < number]
        desync = (dim, members, number) in mismatches
        parts = merged.setdefault((dim, op, number, bool(behind) or desync), ([], [], []))
        for whole, part in zip(parts, ([members], ranks, behind), strict=True):
            whole += part
    return merged


def _mismatches(post_mortem: PostMortem) -> dict[tuple, list[tuple[frozenset, list[int]]]]:
    """Of each group (dim, members) the first number under which ranks called different things."""
    called: dict[tuple, dict[int, dict[int, set[str]]]] = {}
    for rank, record in post_mortem.records.items():
        for entry in record["collectives"] or []:
            if not entry["p2p"]:
                by_number = called.setdefault(group_of(record, entry), {})
                by_rank = by_number.setdefault(entry["number"], {})
                by_rank.setdefault(rank, set()).add(_signature(entry))
    mismatches = {}
    for group, by_number in called.items():
        for number, by_rank in sorted(by_number.items()):
            kinds = alike(by_rank, lambda rank, calls=by_rank: frozenset(calls[rank]))
            # A coalesced call has several entries of one number, some of which may be cut off.
            if not all(kinds[0][0] & kind for kind, _ in kinds):
                mismatches[(*group, number)] = kinds
                break
    return mismatches


def _signature(entry: dict) -> str:
    """What must be the same on all ranks of a collective."""
    op = _op(entry)
    if not any(word in op for word in SAME_SIZE):
        return op
    sizes = ", ".join(map(str, entry["sizes"][0]))
    return f"{op} of {sizes} {'/'.join(sorted(set(entry['dtypes'])))}".rstrip()
