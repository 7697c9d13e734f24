"""Who is named when the training stands still, with hearts of several ranks in one process."""

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
    made = []

    def make(rank: int, limit: float = LIMIT, on_stall=lambda stall: None) -> Heartbeat:
        launch, mesh = SimpleNamespace(world_size=3), SimpleNamespace(mesh_dim_names=())
        ranks = SimpleNamespace(rank=rank, launch=launch, mesh=mesh, store=store)
        made.append(Heartbeat(ranks, limit, on_stall, Diagnosis(RunDir(tmp_path), ranks)))
        return made[-1]

    yield make
    for heartbeat in made:
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
    found = hearts[0].find_stall()
    assert (found.rank, found.step) == (2, 5)
    assert "rank 2 on " in found.message and "last in step 5, logging" in found.message
    assert "Rank 0 waits for it in step 6, evaluation" in found.message


def test_a_rank_that_is_behind_is_blamed_by_those_ahead_alone(heart):
    hearts = [heart(rank) for rank in range(3)]
    for each in hearts:
        each.at(5, "logging")
    for each in hearts[:2]:
        each.at(5, "evaluation")
    time.sleep(0.3)
    found = hearts[0].find_stall()
    assert found.rank == 2 and "is behind; last in step 5, logging" in found.message
    assert hearts[2].find_stall() is None


def test_a_rank_that_never_came(heart):
    hearts = [heart(rank) for rank in (0, 2)]
    found = hearts[0].find_stall()
    assert found.rank == 1 and "unknown host" in found.message


def test_a_store_that_is_gone(heart, store):
    """Rank 0, which holds it without torchrun, is named, and nobody waits for its answer."""
    first = heart(1)

    def gone(*_):
        time.sleep(60)

    first._store = SimpleNamespace(set=gone, check=gone, multi_get=gone)
    started = time.monotonic()
    found = first.find_stall()
    assert found.rank == 0 and "does not answer" in found.message
    assert time.monotonic() - started < 1


def place(
    *, waits: str | None = None, at: str = "models/decoder.py:1 forward", **last: int
) -> dict:
    """Where a rank stands in the groups of 2x2: numbers of its last tp, dp and world collectives,
    of which it waits in one."""
    rank = last.pop("rank")
    ranks = {
        "tp": "0-1" if rank < 2 else "2-3", "dp": "0, 2" if rank % 2 == 0 else "1, 3",
        "checkpoint": "0-3",
    }  # fmt: skip
    groups = {dim: {"dim": dim, "ranks": ranks[dim], "last": n} for dim, n in last.items()}
    entries = [
        {"group": dim, "op": "gloo:all_reduce", "number": n, "p2p": False,
         "state": "scheduled" if dim == waits else "completed"}
        for dim, n in last.items()
    ]  # fmt: skip
    entries.sort(key=lambda entry: entry["group"] == waits)
    phase = "checkpoint" if "checkpoint" in last else "forward and backward"
    return {"phase": phase, "collectives": entries, "groups": groups,
            "threads": [{"frames": [at]}], "our_code": at}  # fmt: skip


P2P = "/torch/distributed/pipelining/schedules.py:683 _wait_batch_p2p"


@pytest.mark.parametrize(
    ("places", "roots"),
    [
        # 3 waits for 2 in tp, 2 for 0 in dp, 1 for 0 in tp; 0 sleeps.
        ([{"tp": 8, "dp": 4}, {"tp": 9, "dp": 4, "waits": "tp"},
          {"tp": 8, "dp": 5, "waits": "dp"}, {"tp": 9, "dp": 4, "waits": "tp"}], [0]),
        # All have joined: the transport, or a device, is slow.
        ([{"tp": 9, "dp": 4, "waits": "tp"}] * 4, []),
        # Nobody waits: a long phase of all ranks alike.
        ([{"tp": 9, "dp": 4}] * 4, []),
        # 3 writes its shard, and the others have gathered; the training stands in no collective.
        ([{"checkpoint": 7, "waits": "checkpoint"}] * 3 + [{"dp": 4, "checkpoint": 6}], [3]),
        # Two are asleep, each in a tp group of its own.
        ([{"tp": 8}, {"tp": 9, "waits": "tp"}, {"tp": 8}, {"tp": 9, "waits": "tp"}], [0, 2]),
        # A pipeline of four, whose receives are not recorded.
        ([{"at": P2P}, {}, {"at": P2P}, {"at": P2P}], [1]),
        # The one that has not said where it is moves, or has not come.
        ([None, {"tp": 9, "waits": "tp"}, {"tp": 9, "dp": 4, "waits": "dp"}, None], [0, 3]),
    ],
)  # fmt: skip
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
    found = [json.loads((tmp_path / f"diagnosis/rank-0000{r}.json").read_text()) for r in range(3)]
    assert [(f["rank"], f["step"], f["phase"]) for f in found] == [
        (rank, 5, "evaluation") for rank in range(3)
    ]
    assert found[1]["threads"][0]["name"] == "MainThread"
    assert any(
        "tests/training/run/test_heartbeat.py" in frame
        for frame in found[1]["threads"][0]["frames"]
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
