"""Whether the nodes of a job resolve and reach each other, and their clocks. Torch-free."""

import contextlib
import os
import secrets
import socket
import socketserver
import statistics
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, wait

from launch.preflight.node import Report, count, listing

CLOCK_LIMIT_S = 1.0
CLOCK_ROUNDS = 5
CONNECT_S = 5.0  # a connection inside a cluster takes milliseconds
THREADS = 128  # connections that a node opens at a time
SENTENCES = 10  # about links; where a whole fabric is down, more would not help


class _Answer(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        self.request.settimeout(CONNECT_S)
        with contextlib.suppress(OSError):
            while self.request.recv(1):
                self.request.sendall(f"{self.server.token} {time.time()!r}\n".encode())


class Listener(socketserver.ThreadingTCPServer):
    """A free port that tells who listens there, and the time of this node."""

    daemon_threads = True
    request_queue_size = 1024

    def __init__(self):
        both = socket.has_dualstack_ipv6()
        self.address_family = socket.AF_INET6 if both else socket.AF_INET
        self.token = secrets.token_hex(8)
        super().__init__(("", 0), _Answer, bind_and_activate=False)
        if both:
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        self.server_bind()
        self.server_activate()
        threading.Thread(target=self.serve_forever, args=(0.1,), daemon=True).start()

    def describe(self) -> dict:
        """What other nodes need to connect to this one."""
        host, address = socket.gethostname(), None
        with contextlib.suppress(OSError):
            address = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0]
        return {
            "host": host,
            "resolves": address,
            # With that variable gloo binds to another interface, and tells its peers that address.
            "address": None if os.environ.get("GLOO_SOCKET_IFNAME") else address,
            "port": self.server_address[1],
            "token": self.token,
        }


def _ask(address: str, port: int, rounds: int) -> tuple[str, float, float]:
    """Token, clock offset and round trip in seconds, of the quickest of some round trips."""
    best = ("", 0.0, float("inf"))
    with socket.create_connection((address, port), timeout=CONNECT_S) as peer:
        for _ in range(rounds):
            sent = time.time()
            peer.sendall(b"?")
            answer = b""
            while not answer.endswith(b"\n"):
                part = peer.recv(100)
                if not part:
                    raise ConnectionResetError("closed by the other side")
                answer += part
            received = time.time()
            token, clock = answer.split()
            # NTP assumes the same: the answer was written half-way, give or take half a round trip.
            if received - sent < best[2]:
                best = (token.decode(), float(clock) - (sent + received) / 2, received - sent)
    return best


def _visit(target: dict, rounds: int) -> dict:
    try:
        named = socket.getaddrinfo(target["host"], None, type=socket.SOCK_STREAM)[0][4][0]
    except OSError:
        return {"fault": "name"}
    try:
        # The second address is the one that the node itself tells its peers, as gloo does.
        for address in dict.fromkeys((named, target["address"] or named)):
            token, offset, round_trip = _ask(address, target["port"], rounds)
            if token != target["token"]:
                return {"fault": f"{address} is another machine"}
    except (OSError, ValueError) as error:
        return {"fault": f"{address}: {getattr(error, 'strerror', None) or error}"}
    return {"fault": None, "clock": (offset, round_trip)}


def visit_all(me: str, nodes: dict[str, dict], timeout: float) -> dict:
    """Connect to every other node by name.

    Args:
        nodes: :meth:`Listener.describe` of each, by name; the first one's clock is the reference.
        timeout: seconds for all of them.

    Returns:
        ``faults``: what is wrong, by node; ``clock``: offset of the first node's clock against this
        one and the round trip, in seconds, or None.
    """
    first, others = next(iter(nodes)), [name for name in nodes if name != me]
    pool = ThreadPoolExecutor(max(1, min(THREADS, len(others))))
    # A node's neighbours come first, so that not all nodes connect to the same one at a time.
    at = list(nodes).index(me)
    jobs = {
        name: pool.submit(_visit, nodes[name], CLOCK_ROUNDS if name == first else 1)
        for name in others[at:] + others[:at]
    }
    wait(jobs.values(), timeout=timeout)
    pool.shutdown(wait=False, cancel_futures=True)
    silent = {"fault": f"no answer within {timeout:g} s"}
    visits = {
        name: job.result() if job.done() and not job.cancelled() else silent
        for name, job in jobs.items()
    }
    clock = (0.0, 0.0) if me == first else visits[first].get("clock")
    return {
        "faults": {name: visit["fault"] for name, visit in visits.items() if visit["fault"]},
        "clock": clock,
    }


def judge_names(report: Report, nodes: dict[str, dict], faults: dict[str, dict[str, str]]) -> bool:
    """Say which nodes reach which, one sentence for each node or link at fault.

    Args:
        nodes: :meth:`Listener.describe` by node. faults: those of :func:`visit_all` by node.

    Returns:
        Whether all nodes reach each other.
    """
    for name in [name for name, node in nodes.items() if not node["resolves"]]:
        report.fault(f"{name} cannot resolve its own name: add it to DNS or to its /etc/hosts")
    links = {(a, b): reason for a, of_node in faults.items() for b, reason in of_node.items()}
    all_reached = not links
    for _ in range(SENTENCES):
        if not links:
            break
        # The node with the most failing links explains them; of two such nodes, the source.
        sources = Counter(a for a, _ in links)
        targets = Counter(b for _, b in links)
        (source, from_source), (target, to_target) = (
            sources.most_common(1)[0],
            targets.most_common(1)[0],
        )
        if from_source >= to_target:
            chosen = [link for link in links if link[0] == source]
        else:
            chosen = [link for link in links if link[1] == target]
        reason = links[chosen[0]]
        chosen = [link for link in chosen if (links[link] == "name") == (reason == "name")]
        froms = listing(list(dict.fromkeys(a for a, _ in chosen)))
        if reason == "name":
            to = listing(list(dict.fromkeys(b for _, b in chosen)))
            report.fault(f"{froms} cannot resolve the name {to}: add it to DNS or /etc/hosts there")
        else:
            to = listing(list(dict.fromkeys(f"{b}:{nodes[b]['port']}" for _, b in chosen)))
            report.fault(
                f"{froms} cannot reach {to} ({reason}): open all ports between the nodes in the "
                "firewall, and check that names in /etc/hosts lead to the right addresses"
            )
        for link in chosen:
            del links[link]
    if links:
        report.fault(f"{len(links)} more connections between nodes fail")
    if all_reached and len(nodes) > 1:
        report.say(f"names and ports: {len(nodes)} nodes resolve and reach each other")
    return all_reached


def judge_clocks(report: Report, clocks: dict[str, tuple[float, float] | None]) -> None:
    """Name nodes whose clock is off, from :func:`visit_all` by node.

    Half of the round trips is allowed as error. A node whose clock could not be asked is skipped:
    it cannot be reached, which is a fault of its own.
    """
    clocks = {node: clock for node, clock in clocks.items() if clock}
    middle, doubt = statistics.median_low((-offset, trip) for offset, trip in clocks.values())
    worst = 0.0
    for node, (offset, round_trip) in clocks.items():
        ahead = -offset - middle
        worst = max(worst, abs(ahead))
        if abs(ahead) - (round_trip + doubt) / 2 > CLOCK_LIMIT_S:
            side = "ahead of" if ahead > 0 else "behind"
            report.fault(
                f"the clock of {node} is {abs(ahead):.1f} s {side} the others: start chronyd or "
                "ntpd there"
            )
    if len(clocks) > 1:
        report.say(f"clocks of {count(len(clocks), 'node')}: {worst * 1000:.1f} ms apart or less")
