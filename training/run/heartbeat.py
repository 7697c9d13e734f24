"""Which rank is stuck, and where: every rank tells the others its step and phase.

A rank that waits in a collective cannot tell why the others do not come. So a thread of each
process writes into the store of the launch what its training is doing, and ends the process when
the training has stood still for too long because of a rank that is gone or behind.
"""

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

from parallel.mesh import Ranks
from training.run.diagnosis import Diagnosis
from training.run.waiting import find_roots


class Beat(NamedTuple):
    """The last message of a rank: ``beats`` grows while it lives, ``moves`` while it trains.

    ``place`` is where its training stands (:meth:`Diagnosis.place`), None while it moves.
    """

    beats: int
    moves: int
    step: int
    phase: str
    host: str
    place: dict | None = None


class Stall(NamedTuple):
    """The rank that the others wait for, its last step, a line about it, and all silent ranks."""

    rank: int
    step: int
    message: str
    silent: tuple[int, ...] = ()


class Heartbeat:
    """Sends the beats of this rank and watches those of all ranks.

    Args:
        limit: seconds that the training may stand still: no phase ends, and no collective begins.
            A training that stands still on all ranks alike, as in a long save, is left alone.
        on_stall: called from the watching thread, since the main thread is stuck; has to end the
            process.
        diagnosis: writes the post-mortem of this rank, when a rank asks for it.
    """

    def __init__(
        self,
        ranks: Ranks,
        limit: float,
        on_stall: Callable[[Stall], None],
        diagnosis: Diagnosis,
    ):
        self._rank, self._world_size = ranks.rank, ranks.launch.world_size
        self._limit, self._on_stall, self._diagnosis = limit, on_stall, diagnosis
        self._interval = min(2.0, limit / 20)
        # Seconds to wait for the answers to ask_all: a beat to read the request, and two to write.
        self._patience = min(5.0, 3 * self._interval)
        self._beats, self._now, self._moved = 0, (0, 0, "start"), time.monotonic()
        self._stopped, self._answered, self._calls = threading.Event(), 0, 0
        self._place, self._looking = None, threading.Thread()
        # The training's own client would make this thread wait while the training waits.
        self._store = ranks.store.clone() if self._world_size > 1 else None
        self._beat()
        threading.Thread(target=self._watch, name="heartbeat", daemon=True).start()

    def at(self, step: int, phase: str) -> None:
        """Note the phase that begins; all ranks note the same phases in the same order.

        The call costs an assignment: the thread does the rest.
        """
        self._now, self._moved = (self._now[0] + 1, step, phase), time.monotonic()

    def stop(self) -> None:
        """Stop watching: the ranks are about to leave."""
        self._stopped.set()

    def leave(
        self, error: BaseException | None = None, lost_peer: bool = False
    ) -> threading.Thread:
        """Write the post-mortem of this rank, in the thread that is returned.

        Args:
            error, lost_peer: the exception that ends the training, as in :meth:`Diagnosis.note`.
        """
        if error:
            self._diagnosis.note(error, lost_peer=lost_peer)
        return self._diagnosis.write(self._answered + 1, *self._now[1:])

    def ask_all(self, silent: Collection[int] = ()) -> None:
        """Have every rank write its post-mortem, and this one also the last beats of all.

        This takes at most about five seconds, less where all answer. Without the store no other
        rank can be asked, and this rank writes its own alone.

        Args:
            silent: ranks that are known not to answer.
        """
        asked = self._ask(lambda: self._store.add("diagnosis/asked", 1))
        if asked is None:
            self.leave()
            return
        if beats := self._read_all():
            # Before the wait, in which this process may be ended.
            self._diagnosis.write_beats(asked, [beat[:5] for beat in beats]).join(1)
        others = (rank for rank in range(self._world_size) if rank not in silent)
        keys = [f"diagnosis/{asked}/{rank}" for rank in others]
        end = time.monotonic() + self._patience
        while time.monotonic() < end:
            self._beat()  # also answers for this rank
            if self._ask(lambda: self._store.check(keys)) is not False:
                break  # all have answered, or the store is gone
            time.sleep(self._interval / 4)
        self._ask(lambda: self._store.add("diagnosis/done", 1))

    def linger(self) -> None:
        """Stay while another rank asks: without torchrun, rank 0 holds the store for all."""

        def done() -> int | None:
            return self._ask(lambda: self._store.add("diagnosis/done", 0))

        before, end = done(), time.monotonic() + self._patience
        while self._rank == 0 and time.monotonic() < end and done() == before:
            time.sleep(self._interval / 4)

    def find_stall(self) -> Stall | None:
        """Listen for a few seconds: the rank that keeps the others waiting, or None."""
        first = self._read_all()
        for _ in range(3 if first else 0):
            time.sleep(self._interval)
            self._beat()  # the others listen too
        last = self._read_all()
        if first is None and last:
            return None  # the store is only slow
        if last is None:
            message = "rank 0 or its node does not answer: the store of the launch is there"
            return Stall(0, 0, message)
        silent = [r for r in range(self._world_size) if last[r].beats == first[r].beats]
        behind = min(beat.moves for beat in last)
        # A rank that has meanwhile gone on, or joined the others, is a root of only one of the two.
        roots = [r for r in self._roots(last) if r in self._roots(first)]
        if silent:
            ranks, what = silent, "does not answer: its process is stopped or gone"
        elif behind < last[self._rank].moves:
            # A rank that is itself behind never comes here: those ahead name it. At the end of a
            # long phase of all ranks, some are behind for an instant: that ends nothing.
            slow = [r for r in range(self._world_size) if last[r].moves == behind]
            # Of several in the same phase, some may wait for one that is in no collective.
            ranks, what = [r for r in slow if r in roots] or slow, "is behind"
        elif roots and self._rank not in roots and last[self._rank].place:
            ranks, what = roots, "is in no collective"
        else:
            return None
        rank, beat, mine = ranks[0], last[ranks[0]], last[self._rank]
        more = f" (and {len(ranks) - 1} more)" if len(ranks) > 1 else ""
        message = f"rank {rank} on {beat.host}{more} {what}; last in step {beat.step}, {beat.phase}"
        if beat.place and beat.place["our_code"]:
            message += f", at {beat.place['our_code']}"
        if rank != self._rank:
            message += f". Rank {self._rank} waits for it in step {mine.step}, {mine.phase}"
        return Stall(rank, beat.step, message, tuple(silent))

    @staticmethod
    def _roots(beats: list[Beat]) -> list[int]:
        return find_roots({rank: beat.place for rank, beat in enumerate(beats) if beat.place})

    def _watch(self) -> None:
        # Listening takes three intervals. Three more are spare, one of them until a collective is
        # seen to have begun, so that listening ends before the timeout of the collective.
        patience = self._limit - 6 * self._interval - self._patience
        while not self._stopped.wait(self._interval):
            self._beat()
            if self._diagnosis.asked_by_signal():
                self.ask_all()
            if (calls := self._diagnosis.calls()) != self._calls:
                self._calls, self._moved = calls, time.monotonic()
            moved = self._moved
            if self._world_size == 1 or time.monotonic() - moved < patience:
                continue
            stall = self.find_stall()
            if stall and moved == self._moved and not self._stopped.is_set():
                self._on_stall(stall)

    def _beat(self) -> None:
        self._beats += 1
        if time.monotonic() - self._moved < 2 * self._interval:
            self._place = None
        elif not self._looking.is_alive():
            # In a thread: the flight recorder may wait for a device that is stuck.
            self._looking = threading.Thread(target=self._update_place, daemon=True)
            self._looking.start()
        beat = json.dumps(Beat(self._beats, *self._now, socket.gethostname(), self._place))

        def tell() -> int:
            self._store.set(f"heartbeat/{self._rank}", beat)
            return self._store.add("diagnosis/asked", 0)

        asked = self._ask(tell)
        if asked and asked != self._answered:
            self._answered, key = asked, f"diagnosis/{asked}/{self._rank}"
            self._diagnosis.write(asked, *self._now[1:], then=lambda: self._store.set(key, ""))

    def _update_place(self) -> None:
        moved = self._moved
        place = self._diagnosis.place(self._now[2])
        self._place = place if moved == self._moved else None

    def _read_all(self) -> list[Beat] | None:
        """The last beat of each rank, or None if the store does not answer."""
        keys = [f"heartbeat/{rank}" for rank in range(self._world_size)]

        def read() -> list[Beat]:
            # The store would wait for the key of a rank that has not sent a beat.
            present = keys
            if not self._store.check(keys):
                present = [key for key in keys if self._store.check([key])]
            beats = dict(zip(present, self._store.multi_get(present), strict=True))
            never = json.dumps(Beat(0, -1, 0, "start", "an unknown host"))
            return [Beat(*json.loads(beats.get(key, never))) for key in keys]

        return self._ask(read)

    def _ask(self, call: Callable[[], Any]) -> Any:
        """The store's answer; None if none comes within an interval, or if there is no store.

        Without torchrun the store is in rank 0, which may be killed or stopped like any other. The
        store's own timeout, made for the start, is minutes long. One process alone has no store.
        """
        if self._store is None:
            return None
        answer = []

        def ask() -> None:
            with contextlib.suppress(RuntimeError):
                answer.append(call())

        thread = threading.Thread(target=ask, daemon=True)
        thread.start()
        thread.join(self._interval)
        return answer[0] if answer else None
