"""Which rank the others wait for, from the collective in which each of them stands. Torch-free."""

UNKNOWN = "unknown"
# Where torch waits for a neighbour in the pipeline; gloo's recorder does not know of it.
NEIGHBOUR = ("_wait_batch_p2p", "recv", "irecv")


def ranks_in(text: str) -> set[int]:
    """The ranks of a text like ``0-3, 7``."""
    ranks = set()
    for part in filter(None, text.split(", ")):
        first, _, last = part.partition("-")
        ranks.update(range(int(first), int(last or first) + 1))
    return ranks


def current(record: dict) -> dict | None:
    """The collective that a rank is in, or was in last; None if none is recorded."""
    entries = record["collectives"] or []
    # A save runs in a thread of its own, beside the training.
    training = [e for e in entries if record["groups"][e["group"]]["dim"] != "checkpoint"]
    entries = entries if "checkpoint" in record["phase"] else training
    unfinished = [entry for entry in entries if entry["state"] != "completed"]
    if not unfinished:
        return entries[-1] if entries else None
    # A GPU queues collectives, and the oldest holds up the others. Gloo's caller waits for each,
    # so that older ones are asynchronous: the newest is the one that the caller is in.
    return unfinished[0 if unfinished[-1]["op"].startswith("nccl") else -1]


def group_of(record: dict, entry: dict) -> tuple[str, str]:
    """Dim and members of a group: its name differs from rank to rank."""
    group = record["groups"][entry["group"]]
    return group["dim"], group["ranks"] or UNKNOWN


def last_number(record: dict, group: tuple[str, str]) -> int:
    """The number of a rank's last collective of a group (dim, members); 0 if none is recorded."""
    groups = record["groups"].values()
    return max((g["last"] for g in groups if (g["dim"], g["ranks"]) == group), default=0)


def waits(record: dict) -> bool:
    """Whether a rank stands in a collective, or waits for a neighbour in the pipeline."""
    entry = current(record)
    if entry and entry["state"] != "completed":
        return True
    innermost = record["threads"][0]["frames"][:3] if record["threads"] else []
    return any(frame.endswith(NEIGHBOUR) and "distributed" in frame for frame in innermost)


def find_roots(records: dict[int, dict]) -> list[int]:
    """The ranks that others wait for and that wait for nobody: the ends of all chains of waiting.

    Args:
        records: by rank, ``phase``, ``collectives``, ``groups`` and ``threads`` of its post-mortem.
            A rank without a record is taken to move, and to wait for nobody.
    """
    waiting = {rank for rank, record in records.items() if waits(record)}
    awaited = set()
    for rank in waiting:
        record, entry = records[rank], current(records[rank])
        if entry is None or entry["state"] == "completed" or entry["p2p"]:
            # The neighbour is not recorded: whichever rank waits for nobody holds this one up.
            awaited |= records.keys()
            continue
        group = group_of(record, entry)
        if group[1] != UNKNOWN:
            others = ranks_in(group[1]) - {rank}
            awaited |= {
                other
                for other in others
                if other not in records or last_number(records[other], group) < entry["number"]
            }
    return sorted(awaited - waiting)
