"""How the ranks of a preflight communicate: through the store, before there is a process group."""

import contextlib
import datetime
import json
import os
import socket
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from launch.preflight.node import listing, rank_list
from parallel.launch import Launch
from parallel.rendezvous import MeetingError, meet

LEAVE_S = 5.0  # for the others to read the verdict, where the store is in rank 0
RANKS_LISTED = 8


class EndedError(Exception):
    """The preflight cannot go on; the message is empty where rank 0 says why."""


def join_store(launch: Launch, timeout: float) -> dist.Store:
    """The store that all ranks share.

    Raises:
        EndedError: if they do not come together.
    """
    try:
        return meet(launch, timeout)
    except MeetingError as error:
        if not error.missing:
            raise EndedError(str(error)) from None
        raise EndedError(
            _silent(rank_list(error.missing, RANKS_LISTED), timeout, "start")
        ) from None


def _silent(who: str, timeout: float, what: str) -> str:
    return (
        f"{who} did not answer within {timeout:g} s ({what}): look "
        "whether the process runs there, or is stopped or gone"
    )


class Meeting:
    """Rank 0 asks, the others answer through the store, and who does not answer is named.

    Attributes:
        leaders: the first rank of each node, by name of the node.
        host: on rank 0, the name of the node by rank.
    """

    def __init__(self, launch: Launch, store: dist.Store, timeout: float):
        self.launch, self.store, self.timeout = launch, store, timeout
        self.leaders: dict[str, int] = {}
        self.host: dict[int, str] = {}
        self._silent: list[int] = []

    @property
    def name(self) -> str | None:
        """Name of the node that this rank answers for; None if another rank does."""
        return next((name for name, rank in self.leaders.items() if rank == self.launch.rank), None)

    def find_nodes(self, cores: int) -> dict[str, list[int]]:
        """Find out which rank is on which node.

        Args:
            cores: a bit for each core that this process may use.

        Returns:
            On rank 0, the ``cores`` of the ranks of each node.
        """
        masks: dict[str, list[int]] = {}

        def gather(answers: dict[int, list]) -> dict[str, int]:
            hosts = {}
            for number, host, _ in answers.values():
                hosts.setdefault(host, set()).add(number)
            for rank, (number, host, mask) in answers.items():
                name = host if len(hosts[host]) == 1 else f"{host}#{number}"
                self.host[rank] = name
                self.leaders.setdefault(name, rank)
                masks.setdefault(name, []).append(int(mask, 16))
            return self.leaders

        number = os.environ.get("GROUP_RANK", os.environ.get("SLURM_NODEID", "0"))
        answer = [number, socket.gethostname(), f"{cores:x}"]
        self.leaders = self.exchange("start", answer, gather)
        return masks

    def exchange(
        self,
        what: str,
        answer: Any = None,
        digest: Callable[[dict[int, Any]], Any] = lambda answers: None,
        leaders: bool = False,
    ) -> Any:
        """Send ``answer`` (JSON) to rank 0, and return what ``digest`` computes there from all.

        Args:
            what: name of the check, for the message about a rank that does not answer in time.
            leaders: ask one rank of each node; the others wait, and get None.

        Raises:
            EndedError: on all ranks if one does not answer.
        """
        asked = list(self.leaders.values()) if leaders else list(range(self.launch.world_size))
        rank, store = self.launch.rank, self.store
        try:
            if rank in asked:
                store.set(f"{what}/{rank}", json.dumps(answer))
            if rank == 0:
                try:
                    result = digest(self._collect(what, asked))
                except BaseException:
                    store.set(f"{what}/end", "ended")
                    raise
                # The result may be long, so only the ranks that need it read it.
                store.set(f"{what}/told", json.dumps(result))
                store.set(f"{what}/end", "told")
                return result
            # Rank 0 waits for a silent rank until the timeout, and may judge for as long.
            self._wait([f"{what}/end"], 3 * self.timeout)
            if store.get(f"{what}/end") == b"ended":
                raise EndedError("")
            return json.loads(store.get(f"{what}/told")) if rank in asked else None
        except dist.DistError as error:
            first = str(error).splitlines()[0]
            raise EndedError(
                f"rank {rank} on {socket.gethostname()}: rank 0 does not answer ({what}; {first}): "
                "its process is stopped or gone"
            ) from None

    def leave(self) -> None:
        """Let all ranks read the verdict before rank 0 ends, which may host the store."""
        with contextlib.suppress(RuntimeError):
            self.store.set(f"left/{self.launch.rank}", "")
            if self.launch.rank == 0:
                others = set(range(self.launch.world_size)) - set(self._silent)
                self._wait([f"left/{rank}" for rank in others], LEAVE_S)

    def by_node(self, answers: dict[int, Any]) -> dict[str, Any]:
        """The answers of leaders by name of the node (on rank 0)."""
        return {self.host[rank]: answer for rank, answer in answers.items()}

    def who(self, ranks: list[int]) -> str:
        """Some ranks and their nodes, in words (on rank 0)."""
        text = rank_list(ranks, RANKS_LISTED)
        nodes = list(dict.fromkeys(self.host.get(rank, "") for rank in ranks))
        return f"{text} on {listing(nodes)}" if all(nodes) else text

    def _wait(self, keys: list[str], seconds: float) -> None:
        self.store.wait(keys, datetime.timedelta(seconds=seconds))

    def _collect(self, what: str, asked: list[int]) -> dict[int, Any]:
        keys = [f"{what}/{rank}" for rank in asked]
        try:
            self._wait(keys, self.timeout)
        except dist.DistStoreError:
            silent = [r for r, key in zip(asked, keys, strict=True) if not self.store.check([key])]
            self._silent = silent
            raise EndedError(_silent(self.who(silent), self.timeout, what)) from None
        answers = self.store.multi_get(keys)
        return {rank: json.loads(text) for rank, text in zip(asked, answers, strict=True)}
