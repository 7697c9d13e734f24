"""How ranks meet through a store that may hold what earlier attempts have left."""

import threading

import pytest
import torch.distributed as dist

from common.errors import LayoutError
from parallel import rendezvous
from parallel.launch import Launch
from parallel.rendezvous import MeetingError, first_host, meet

TIMEOUT = 1.0


@pytest.fixture
def attempt(monkeypatch):
    """Let ranks meet through the store of one launcher, as threads; what each came to."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setattr(rendezvous, "POLL_S", 0.01)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(store.port))
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")

    def run(*ranks: int, size: int = 3, tp: dict[int, str] | None = None) -> dict:
        outcomes, tp = {}, tp or {}

        def one(rank: int) -> None:
            mine = tp.get(rank, "2")

            def differs(first: str) -> str | None:
                return None if mine == first else f"--tp is {mine} here and {first} on rank 0"

            try:
                shared = meet(Launch(rank, size, rank, size), TIMEOUT, mine, differs)
                outcomes[rank] = shared.add("ranks", 1) <= size
            except (LayoutError, MeetingError) as error:
                outcomes[rank] = error

        threads = [threading.Thread(target=one, args=(rank,), daemon=True) for rank in ranks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        return outcomes

    yield run
    del store  # which ends with its last reference


def test_ranks_meet_afresh_whoever_was_missing_before(attempt):
    """Nothing counts the attempts: a rank may have been in some of them only."""
    everybody = {0: True, 1: True, 2: True}
    assert attempt(0, 1, 2) == everybody
    assert attempt(0, 1, 2) == everybody
    found = attempt(0, 2)
    assert "1 of 3 processes did not come to the master address 127.0.0.1:" in str(found[0])
    assert "within 1 s: rank 1;" in str(found[0]) and str(found[2]) == ""
    assert attempt(0, 1, 2) == everybody
    found = attempt(1, 2)
    assert all("rank 0 does not confirm this rank" in str(error) for error in found.values())
    assert attempt(0, 1, 2) == everybody
    # With fewer processes, as torchrun may restart.
    assert attempt(0, 1, size=2) == {0: True, 1: True}


def test_what_differs_is_said_before_any_group_is_built(attempt):
    found = attempt(0, 1, 2, tp={2: "4"})
    assert {type(error) for error in found.values()} == {LayoutError}
    assert str(found[0]).startswith("rank 2 on ")
    assert str(found[0]).endswith(": --tp is 4 here and 2 on rank 0")
    assert str(found[2]) == "--tp is 4 here and 2 on rank 0" and str(found[1]) == ""
    # Also of one that has another number of processes, while another is missing.
    found = attempt(0, size=3) | attempt(0, 1, 2, tp={1: "1"})
    assert str(found[0]).endswith(": --tp is 1 here and 2 on rank 0")


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node1", "node1"), ("node[001-004,007],other", "node001"), ("a,b", "a"),
        ("gpu[02,05]-ib", "gpu02-ib"), ("rack[1-2]node[3-4]", "rack1node3"), ("", None),
        ("tux-7.example.org,tux-8", "tux-7.example.org"),
    ],
)  # fmt: skip
def test_the_first_host_of_a_node_list(nodes, first):
    assert first_host(nodes) == first
