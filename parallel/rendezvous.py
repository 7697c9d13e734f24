"""Where the ranks of a launch meet: the address of the launcher, its store, and who has come."""

import datetime
import json
import os
import re
import secrets
import socket
import time
from collections.abc import Callable

import torch.distributed as dist

from common.errors import LayoutError
from parallel.launch import Launch

POLL_S = 0.1
# For a rank that hears of a missing one through rank 0, whose own wait may have begun later.
GRACE_S = 1.0


class MeetingError(RuntimeError):
    """The ranks do not come together, in one line; the message is empty where rank 0 says why.

    Attributes:
        missing: ranks that have not come.
    """

    def __init__(self, message: str, missing: list[int] | None = None):
        super().__init__(message)
        self.missing = missing or []


def first_host(nodes: str) -> str | None:
    """The first name of a SLURM node list such as ``gpu[003-007,9],login1``; None if there is none.

    The same as the first line of ``scontrol show hostnames``, which containers often lack.
    """
    names = re.match(r"(?:[^,\[\]]|\[[^\[\]]*\])+", nodes)
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", names[0]) if names else None


def _slurm_address() -> None:
    """Under plain ``srun``, derive the meeting point that torchrun would set.

    Raises:
        LayoutError: if the step does not say which nodes it has.
    """
    if "MASTER_ADDR" not in os.environ:
        host = first_host(os.environ.get("SLURM_STEP_NODELIST", ""))
        if host is None:
            raise LayoutError(
                "cannot list the nodes of the SLURM step: set MASTER_ADDR to the first one"
            )
        os.environ["MASTER_ADDR"] = host
    # Derived from the job, so that two jobs on one node do not meet; below the ports that the
    # kernel gives to connections.
    job, step = int(os.environ.get("SLURM_JOB_ID", 0)), int(os.environ.get("SLURM_STEP_ID", 0))
    os.environ.setdefault("MASTER_PORT", str(20000 + (job * 7 + step) % 12000))


def _try_address(address: str, port: int, timeout: float, holds: bool) -> str | None:
    """What is wrong with the master address, seen with a plain socket; torch's words are many."""
    deadline = time.monotonic() + timeout
    while True:
        try:
            if holds:
                info = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
                with socket.socket(info[0], socket.SOCK_STREAM) as probe:
                    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    probe.bind(info[4])
            else:
                left = max(0.1, deadline - time.monotonic())
                socket.create_connection((address, port), timeout=left).close()
            return None
        except OSError as error:
            # The others may be here before rank 0 listens.
            if holds or time.monotonic() > deadline:
                return f"{error.strerror or error}" + ("" if holds else f", for {timeout:g} s")
        time.sleep(0.2)


def _open_store(launch: Launch, timeout: float) -> tuple[dist.Store, str]:
    """The store at the master address and that address, without waiting for all ranks.

    Raises:
        LayoutError: if there is no address.
        MeetingError: if it cannot be reached.
    """
    if "RANK" not in os.environ:
        _slurm_address()
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    me = f"rank {launch.rank} on {socket.gethostname()}"
    # torchrun holds the store in the agent of the first node.
    holds = launch.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    fix = "check MASTER_ADDR and MASTER_PORT, that rank 0 runs there, and the firewall"
    if fault := _try_address(address, port, timeout, holds):
        where = "listen at" if holds else "reach"
        raise MeetingError(
            f"{me} cannot {where} the master address {address}:{port} ({fault}): {fix}"
        )
    try:
        store = dist.TCPStore(
            address, port, launch.world_size, holds, datetime.timedelta(seconds=timeout),
            wait_for_workers=False, multi_tenant=True,
        )  # fmt: skip
    except RuntimeError as error:
        first = str(error).splitlines()[0]
        raise MeetingError(
            f"{me}: no store at the master address {address}:{port} ({first}): {fix}"
        ) from None
    return store, f"{address}:{port}"


def meet(
    launch: Launch,
    timeout: float,
    settings: str = "",
    differs: Callable[[str], str | None] = lambda settings: None,
) -> dist.Store:
    """Come together with all ranks; the store that they share, empty at first.

    torchrun keeps its store over a restart, and nodes differ in how often they have restarted. So
    every process makes a token of its own, an attempt is named by that of its rank 0, and who has
    read the name of an earlier attempt is not confirmed and reads it again.

    Args:
        timeout: seconds to wait for the others.
        settings: what rank 0 gives all to compare.
        differs: of the settings of rank 0, what is different here.

    Raises:
        LayoutError: on all ranks, if one of them differs.
        MeetingError: if one does not come.
    """
    if launch.world_size == 1:
        return dist.HashStore()
    store, address = _open_store(launch, timeout)
    token = secrets.token_hex(8)
    if launch.rank == 0:
        _call(store, token, launch, settings, timeout, address)
        return dist.PrefixStore(token, store)
    return dist.PrefixStore(_answer(store, token, launch, differs, timeout, address), store)


def _call(
    store: dist.Store, token: str, launch: Launch, settings: str, timeout: float, address: str
) -> None:
    """Rank 0's part: name the attempt, and confirm all that come."""
    first = {"token": token, "world_size": launch.world_size, "settings": settings}
    store.set("meeting/first", json.dumps(first))
    keys = {rank: f"meeting/{token}/{rank}" for rank in range(1, launch.world_size)}
    fault, deadline = f"meeting/{token}/fault", time.monotonic() + timeout
    while not store.check(list(keys.values())) and time.monotonic() < deadline:
        if store.check([fault]):
            # Those that are here by then need not wait for the timeout.
            deadline = min(deadline, time.monotonic() + GRACE_S)
        time.sleep(POLL_S)
    came = [rank for rank, key in keys.items() if store.check([key])]
    missing, refused = sorted(keys.keys() - set(came)), store.check([fault])
    word = "refused" if refused else "missing" if missing else token
    for other in store.multi_get([keys[rank] for rank in came]):
        store.set(f"meeting/confirmed/{other.decode()}", word)
    if word != token:
        time.sleep(3 * POLL_S)  # for the others to read it, where the store is in this process
    if refused:
        raise LayoutError(store.get(fault).decode())
    if missing:
        listed = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
        raise MeetingError(
            f"{len(missing)} of {launch.world_size} processes did not come to the master address "
            f"{address} within {timeout:g} s: rank{'s' if len(missing) > 1 else ''} {listed}; look "
            "whether they run, and with this address and WORLD_SIZE",
            missing,
        )


def _answer(
    store: dist.Store,
    token: str,
    launch: Launch,
    differs: Callable[[str], str | None],
    timeout: float,
    address: str,
) -> str:
    """The part of the other ranks: answer rank 0 until it confirms; the name of the attempt."""
    me, difference, first = f"rank {launch.rank} on {socket.gethostname()}", None, None
    key, deadline = f"meeting/confirmed/{token}", time.monotonic() + timeout
    try:
        while not store.check([key]):
            if store.check(["meeting/first"]) and store.get("meeting/first") != first:
                first = store.get("meeting/first")
                said, deadline = json.loads(first), time.monotonic() + timeout + GRACE_S
                difference = differs(said["settings"])
                if said["world_size"] != launch.world_size:
                    sizes = f"WORLD_SIZE is {launch.world_size} here and {said['world_size']}"
                    difference = f"{sizes} on rank 0: start all processes of a run alike"
                if difference:  # before the answer, with which rank 0 may confirm all
                    store.set(f"meeting/{said['token']}/fault", f"{me}: {difference}")
                store.set(f"meeting/{said['token']}/{launch.rank}", token)
            elif time.monotonic() > deadline:
                what = "does not confirm this rank" if first else "did not come"
                raise MeetingError(
                    f"{me}: rank 0 {what} at the master address {address} within {timeout:g} s: "
                    "look whether it runs, and whether another process is this rank"
                )
            time.sleep(POLL_S)
        word = store.get(key).decode()
    except dist.DistError:
        word = "refused" if difference else "missing"  # rank 0 has left, and with it the store
    if word == "refused":
        raise LayoutError(difference or "")
    if word == "missing":
        raise MeetingError("")
    return word
