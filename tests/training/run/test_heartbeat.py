"""Who is named when the training stands still, with heartbeats of several ranks in one process."""

import json
import os
import shutil
import signal
import time
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from training.run.diagnosis import Diagnosis
from training.run.directory import RunDir
from training.run.heartbeat import Heartbeat
from training.run.waiting import find_roots

LIMIT = 2.0  # an interval of 0.1 seconds


@pytest.fixture
def store():
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.fixture
def heart(store, tmp_path):
    """Make the heart of a rank among three; all are stopped in the end."""
    hearts = []

    def make(rank: int, limit: float = LIMIT, on_stall=lambda stall: None) -> Heartbeat:
        launch, mesh = SimpleNamespace(world_size=3), SimpleNamespace(mesh_dim_names=())
        ranks = SimpleNamespace(rank=rank, launch=launch, mesh=mesh, store=store)
        hearts.append(Heartbeat(ranks, limit, on_stall, Diagnosis(RunDir(tmp_path), ranks)))
        return hearts[-1]

    yield make
    for heartbeat in hearts:
        heartbeat.stop()


def test_nobody_is_blamed_where_all_stand_at_one_place(heart):
    hearts = [heart(rank) for rank in range(3)]
    for each in hearts:
        each.at(5, "checkpoint")
    assert hearts[0].find_stall() is None


def test_a_silent_rank(heart):
    hearts = [heart(rank) for rank in range(3)]
    for each in hearts:
        each.at(5, "logging")
    time.sleep(0.3)
    hearts[2].stop()
    time.sleep(0.3)
    hearts[0].at(6, "evaluation")
    stall = hearts[0].find_stall()
    assert (stall.rank, stall.step) == (2, 5)
    assert "rank 2 on " in stall.message and "last in step 5, logging" in stall.message
    assert "Rank 0 waits for it in step 6, evaluation" in stall.message


def test_a_rank_that_is_behind_is_blamed_by_those_ahead_alone(heart):
    hearts = [heart(rank) for rank in range(3)]
    for each in hearts:
        each.at(5, "logging")
    for each in hearts[:2]:
        each.at(5, "evaluation")
    time.sleep(0.3)
    stall = hearts[0].find_stall()
    assert stall.rank == 2 and "is behind; last in step 5, logging" in stall.message
    assert hearts[2].find_stall() is None


def test_a_rank_that_never_came(heart):
    hearts = [heart(rank) for rank in (0, 2)]
    stall = hearts[0].find_stall()
    assert stall.rank == 1 and "unknown host" in stall.message


def test_a_store_that_is_gone(heart, store):
    """Rank 0, which holds it without torchrun, is named, and nobody waits for its answer."""
    first = heart(1)

    def gone(*_):
        time.sleep(60)

    first._store = SimpleNamespace(set=gone, check=gone, multi_get=gone)
    started = time.monotonic()
    stall = first.find_stall()
    assert stall.rank == 0 and "does not answer" in stall.message
    assert time.monotonic() - started < 1


def place(
    *, rank: int, waits: str | None = None, at: str = "models/decoder.py:1 forward", **last: int
) -> dict:
    """Where a rank stands in the groups of 2x2.

    Args:
        waits: the group in whose last collective the rank waits.
        last: numbers of the rank's last tp, dp and checkpoint collectives.
    """
    tp, dp = ("0-1" if rank < 2 else "2-3"), ("0, 2" if rank % 2 == 0 else "1, 3")
    ranks = {"tp": tp, "dp": dp, "checkpoint": "0-3"}
    groups = {dim: {"dim": dim, "ranks": ranks[dim], "last": n} for dim, n in last.items()}
    common = {"op": "gloo:all_reduce", "p2p": False}
    entries = [
        {"group": dim, "number": n, "state": "scheduled" if dim == waits else "completed"} | common
        for dim, n in last.items()
    ]
    entries.sort(key=lambda entry: entry["group"] == waits)
    return {
        "phase": "checkpoint" if "checkpoint" in last else "forward and backward",
        "collectives": entries,
        "groups": groups,
        "threads": [{"frames": [at]}],
        "our_code": at,
    }


P2P = "/torch/distributed/pipelining/schedules.py:683 _wait_batch_p2p"
IN_TP = {"tp": 9, "waits": "tp"}
IN_DP = {"tp": 8, "dp": 5, "waits": "dp"}
SAVED = {"checkpoint": 7, "waits": "checkpoint"}
# By name, where each rank stands (None: it has not said), and who holds up the others.
PLACES = {
    "3 waits for 2 in tp, 2 for 0 in dp, 1 for 0 in tp; 0 sleeps": (
        [{"tp": 8, "dp": 4}, IN_TP | {"dp": 4}, IN_DP, IN_TP | {"dp": 4}],
        [0],
    ),
    "all have joined: the transport, or a device, is slow": ([IN_TP | {"dp": 4}] * 4, []),
    "nobody waits: a long phase of all ranks alike": ([{"tp": 9, "dp": 4}] * 4, []),
    "3 writes its shard, and the others have gathered": (
        [SAVED] * 3 + [{"dp": 4, "checkpoint": 6}],
        [3],
    ),
    "two are asleep, each in a tp group of its own": ([{"tp": 8}, IN_TP, {"tp": 8}, IN_TP], [0, 2]),
    "a pipeline of four, whose receives are not recorded": (
        [{"at": P2P}, {}, {"at": P2P}, {"at": P2P}],
        [1],
    ),
    "a rank that has not said where it is moves, or has not come": (
        [None, IN_TP, IN_DP | {"tp": 9, "dp": 4}, None],
        [0, 3],
    ),
}


@pytest.mark.parametrize(("places", "roots"), PLACES.values(), ids=PLACES)
def test_who_stands_at_the_end_of_all_waiting(places, roots):
    told = {r: place(rank=r, **kwargs) for r, kwargs in enumerate(places) if kwargs is not None}
    if None in places:
        told[2] = place(rank=2, tp=9, waits="tp")  # for rank 3
    assert find_roots(told) == roots


def test_the_watch_ends_a_training_that_stands_still(heart):
    """Within the limit, and not while it moves."""
    stalls = []
    hearts = [heart(rank, LIMIT, stalls.append) for rank in range(3)]
    for step in range(8):
        for each in hearts:
            each.at(step, "logging")
        time.sleep(0.3)
    assert stalls == []
    hearts[0].at(8, "evaluation")
    hearts[1].at(8, "evaluation")
    moved = time.monotonic()
    while not stalls and time.monotonic() - moved < 10:
        time.sleep(0.01)
    assert time.monotonic() - moved < LIMIT + 0.1
    assert {stall.rank for stall in stalls} == {2}


def test_one_rank_asks_and_all_leave_their_diagnosis(heart, tmp_path):
    """Also a signal asks, while the main thread is elsewhere."""
    hearts = [heart(rank) for rank in range(3)]
    for each in hearts:
        each.at(5, "evaluation")
    started = time.monotonic()
    hearts[0].ask_all()
    assert time.monotonic() - started < 1
    records = [
        json.loads((tmp_path / f"diagnosis/rank-0000{r}.json").read_text()) for r in range(3)
    ]
    assert [(f["rank"], f["step"], f["phase"]) for f in records] == [
        (rank, 5, "evaluation") for rank in range(3)
    ]
    assert records[1]["threads"][0]["name"] == "MainThread"
    assert any(
        "tests/training/run/test_heartbeat.py" in frame
        for frame in records[1]["threads"][0]["frames"]
    )
    assert len(json.loads((tmp_path / "diagnosis/beats.json").read_text())["beats"]) == 3

    shutil.rmtree(tmp_path / "diagnosis")
    os.kill(os.getpid(), signal.SIGUSR2)
    answers = [tmp_path / f"diagnosis/rank-0000{rank}.json" for rank in range(3)]
    while not all(file.exists() for file in answers) and time.monotonic() - started < 10:
        time.sleep(0.05)
    assert time.monotonic() - started < 10


def test_a_rank_that_cannot_write_or_ask_goes_on(heart, store, tmp_path):
    """Neither a run directory that takes nothing nor a store that is gone raises or blocks."""
    (tmp_path / "diagnosis").touch()
    first = heart(1)

    def gone(*_):
        time.sleep(60)

    first._store = SimpleNamespace(set=gone, check=gone, add=gone, multi_get=gone)
    started = time.monotonic()
    first.leave(ValueError("the error")).join()
    first.ask_all()
    assert time.monotonic() - started < 1 and (tmp_path / "diagnosis").read_bytes() == b""
