"""The preflight: real processes on two "nodes", and its judgement of numbers and texts.

A node is a mount and a UTS namespace of its own: another host name, another /etc/hosts, and where
wanted another file system over the run directory.
"""

import contextlib
import ctypes
import io
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pynvml
import pytest

from launch.preflight import __main__ as preflight
from launch.preflight import bandwidth, checks, gpus, network, node
from launch.preflight.meeting import Meeting
from launch.preflight.node import Report
from parallel.launch import Launch
from tests.ranks import Group, free_port
from tests.runs import REPO

FLAGS = ["--tp", "2", "--preflight-mib", "1"]
NEW_MOUNTS, NEW_NAMES = 0x00020000, 0x04000000  # CLONE_NEWNS, CLONE_NEWUTS of unshare(2)

needs_root = pytest.mark.skipif(
    subprocess.run(["unshare", "--mount", "--uts", "true"], stderr=subprocess.DEVNULL).returncode
    != 0,
    reason="mounts and host names need root",
)


def enter_node(host: str, hosts: str, hide: str = "", path: str = "") -> None:
    """Give this process a host name, an /etc/hosts, an empty folder, a folder to import from."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(NEW_MOUNTS | NEW_NAMES):
        raise OSError(ctypes.get_errno(), "unshare")
    socket.sethostname(host)
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    subprocess.run(["mount", "--bind", hosts, "/etc/hosts"], check=True)
    if hide:
        subprocess.run(["mount", "-t", "tmpfs", "none", hide], check=True)
    if path:
        sys.path.insert(0, path)


def launcher(name: str, rank: int, world_size: int, port: int) -> dict[str, str]:
    """What torchrun, or srun, sets for a rank of nodes with two each."""
    master = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    where = [str(n) for n in (rank, world_size, rank % 2, rank // 2)]
    if name == "torchrun":
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "GROUP_RANK")
        return dict(zip(names, where, strict=True)) | {"LOCAL_WORLD_SIZE": "2"} | master
    names = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_NODEID")
    tasks = {"SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_JOB_ID": "7"}
    return dict(zip(names, where, strict=True)) | tasks | master


def start(
    argv: list[str],
    by: str,
    first: int,
    world_size: int,
    port: int,
    nodes: list[dict],
    hanging: int | None = None,
) -> tuple[int, str]:
    """Run the preflight in this process as ``by`` would start it; exit code, stdout and stderr.

    Args:
        first: rank of the first process of the group.
        nodes: of :func:`enter_node`; none: all are on this one.
        hanging: a rank that sleeps in place of its first collective.
    """
    rank = first + int(os.environ["RANK"])
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        del os.environ[name]
    os.environ |= launcher(by, rank, world_size, port)
    if nodes:
        enter_node(**nodes[rank // 2])
    if rank == hanging:
        bandwidth.mesh_speed = lambda *_: time.sleep(60)
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        code = preflight.run(argv)
    return code, out.getvalue()


def import_all() -> None:
    """Do nothing: to know this function is to have imported what this file does."""


@pytest.fixture
def group():
    """Four processes that only live for one test: their namespaces cannot be undone."""
    made = Group(4, process_group=False)
    # On a busy machine one may be done with it seconds before another.
    made.run(import_all)
    yield made
    made.close()


@pytest.fixture
def hosts(tmp_path):
    file = tmp_path / "hosts"
    file.write_text("127.0.0.1 localhost nodeA nodeB\n")
    return str(file)


@contextlib.contextmanager
def throttled(pid: int, run_dir: Path):
    """Stop a process for nineteen twentieths of the time, once the probe in ``run_dir`` is gone.

    What is measured comes after it; throttled before, on a busy machine, it would come too late.
    """
    over = threading.Event()

    def throttle() -> None:
        for there in (True, False):
            while run_dir.exists() != there and not over.wait(0.002):
                pass
        while not over.is_set():
            os.kill(pid, signal.SIGSTOP)
            time.sleep(0.19)
            os.kill(pid, signal.SIGCONT)
            time.sleep(0.01)

    thread = threading.Thread(target=throttle)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def faults(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("FAULT: ")]


@needs_root
def test_two_healthy_nodes(tmp_path, hosts):
    """With torchrun on each; the run directory is as it was before."""
    run_dir, port = tmp_path / "run", free_port()
    run_dir.mkdir()
    (run_dir / "status.json").write_text("{}")
    agents = []
    for i, host in enumerate(("nodeA", "nodeB")):
        torchrun = f"-m torch.distributed.run --nnodes 2 --node-rank {i} --nproc-per-node 2"
        master = f"--master-addr nodeA --master-port {port}"
        program = shlex.join(["-m", "launch.preflight", *FLAGS, "--run-dir", str(run_dir)])
        command = f"{shlex.quote(sys.executable)} {torchrun} {master} {program}"
        script = f"mount --bind {hosts} /etc/hosts && hostname {host} && exec {command}"
        words = ["unshare", "--mount", "--uts", "bash", "-c", script]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        agents.append(subprocess.Popen(words, cwd=REPO, text=True, **pipes))
    first, second = (agent.communicate(timeout=120) for agent in agents)
    assert [agent.returncode for agent in agents] == [0, 0], (first, second)
    assert second[0] == "", "only rank 0 speaks"
    text = first[0]
    assert "layout 2x2 on 4 ranks, 2 nodes (nodeA and nodeB)" in text
    assert "names and ports: 2 nodes resolve and reach each other" in text
    assert "no GPUs: CPU and gloo" in text
    assert f"run directory: {run_dir} is shared and writable on 2 nodes" in text
    rows = [line.split()[:2] for line in text.splitlines() if " GB/s " in line]
    for dim in ("dp", "tp"):
        for name in ("all-reduce", "all-gather", "reduce-scatter"):
            assert [dim, name] in rows
    assert ["node", "send"] in rows
    assert "slowest node: node" in text and "preflight: all is well" in text
    assert [(p.name, p.read_text()) for p in run_dir.iterdir()] == [("status.json", "{}")]


@needs_root
def test_every_fault_is_named(tmp_path, hosts, group):
    """A run directory that is not shared, another numpy, a name that leads nowhere, a slow rank."""
    shared, other_hosts, packages = (tmp_path / n for n in ("shared", "other-hosts", "packages"))
    shared.mkdir()
    other_hosts.write_text("127.0.0.1 localhost nodeB\n192.0.2.1 nodeA\n")
    info = packages / "numpy-0.1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: numpy\nVersion: 0.1\n")
    nodes = [
        {"host": "nodeA", "hosts": hosts},
        {"host": "nodeB", "hosts": str(other_hosts), "hide": str(shared), "path": str(packages)},
    ]
    pids = group.run(os.getpid)
    flags = [*FLAGS, "--run-dir", str(shared / "run"), "--preflight-timeout", "16"]
    with throttled(pids[3], shared / "run"):
        results = group.run(start, flags, "torchrun", 0, 4, free_port(), nodes)
    text = results[0][1]
    assert [code for code, _ in results] == [1, 1, 1, 1], text
    assert not any(said for _, said in results[1:])
    found = faults(text)
    for words in (
        ["numpy is 0.1 on nodeB, but", "on nodeA: install the same version"],
        ["nodeB cannot reach nodeA:", "(192.0.2.1"],
        [f"run directory {shared}/run is missing on nodeB"],
        ["slow: rank 3 on nodeB (matrix multiplication at"],
    ):
        assert [line for line in found if all(word in line for word in words)], (words, text)
    assert len(found) == 4, text
    assert "bandwidths: not measured" in text
    assert not (shared / "run").exists()


@needs_root
def test_a_rank_that_hangs_is_named(tmp_path, hosts, group):
    """Under srun, where the store is in rank 0; the rank sleeps in place of its collectives."""
    nodes = [{"host": host, "hosts": hosts} for host in ("nodeA", "nodeB")]
    argv = [*FLAGS, "--run-dir", str(tmp_path / "run"), "--preflight-timeout", "6"]
    results = group.run(start, argv, "srun", 0, 4, free_port(), nodes, 3)
    assert {code for code, _ in results} == {1}
    (found,) = faults(results[0][1])
    assert "rank 3 on nodeB hangs in the start of the process group" in found


def test_ranks_that_do_not_come(tmp_path, group):
    argv = ["--run-dir", str(tmp_path), "--preflight-timeout", "3"]
    results = group.run(start, argv, "srun", 0, 8, free_port(), [])
    assert {code for code, _ in results} == {1}
    (found,) = faults(results[0][1])
    assert "ranks 4, 5, 6 and 7 did not answer within 3 s (start)" in found


def test_a_master_port_where_nobody_listens(tmp_path, group):
    """Said once a node, by its first rank."""
    argv = ["--run-dir", str(tmp_path), "--preflight-timeout", "1"]
    port = free_port()
    results = group.run(start, argv, "srun", 4, 8, port, [])
    assert {code for code, _ in results} == {1}
    host = socket.gethostname()
    for rank, (_, text) in enumerate(results, start=4):
        said = f"rank {rank} on {host} cannot reach the master address 127.0.0.1:{port}"
        assert text.startswith(f"launch.preflight: {said}") if rank % 2 == 0 else text == ""
        assert "Traceback" not in text


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--preflight-mib 0", "'0' is not a positive whole number"),
        ("--print-plan", "--print-plan needs no nodes"),
        ("--tp 3", "--tp 3 does not divide the 1 processes"),
        ("--recipe nonsense", "--recipe nonsense: no such recipe"),
    ],
)
def test_bad_flags(tmp_path, no_launcher, argv, message):
    command = [sys.executable, "-X", "importtime", "-m", "launch.preflight", *argv.split()]
    env = os.environ | {"PYTHONPATH": str(REPO)}
    done = subprocess.run(command, env=env, text=True, capture_output=True)
    (error,) = [line for line in done.stderr.splitlines() if not line.startswith("import time:")]
    assert done.returncode == 2
    assert error.startswith("launch.preflight: error: ") and message in error
    assert not done.stdout
    imported = {line.split("|")[-1].strip() for line in done.stderr.splitlines()}
    assert "torch" not in imported


def said(judge, *args) -> Report:
    """What a judgement finds; its lines are in ``lines``."""
    report = Report()
    report.lines = []
    report.say = report.lines.append
    report.result = judge(report, *args)
    return report


def test_the_minority_is_named():
    values = {"a": "2.13", "b": "2.12", "c": "2.13", "d": "2.11", "e": "2.13", "f": "2.13"}
    report = said(node.judge_equal, "torch", values, "install one")
    assert report.faults == [
        "torch is 2.12 on b, but 2.13 on a, c, e and f: install one",
        "torch is 2.11 on d, but 2.13 on a, c, e and f: install one",
    ]
    many = {f"n{i}": i == 7 for i in range(9)}
    (fault,) = said(node.judge_equal, "it", many, "repair").faults
    assert fault == "it is True on n7, but False on n0, n1, n2 and 5 more: repair"


def test_versions_of_this_node():
    found = node.versions("535.1", "config")
    report = said(node.judge_versions, {"a": found, "b": dict(found)})
    assert not report.faults and found["the code"].startswith(("commit ", "in no git"))
    other = found | {"the config": "x"}
    (fault,) = said(node.judge_versions, {"a": found, "b": other}).faults
    assert fault.startswith("the config is x on b, but ") and "same flags" in fault


def test_limits():
    enough = {"files": 9000, "memlock": float("inf"), "core": 0}
    enough |= {"shm_total": 2**36, "shm_free": 2**35}
    few = enough | {"files": 1024, "memlock": 2**23, "shm_free": 2**26}
    report = said(node.judge_limits, {"a": enough, "b": few}, 4096, True)
    assert report.faults == [
        "a process may open 1024 files on b, and 4096 ranks need about 8704: raise 'ulimit -n' "
        "where the job is started"
    ]
    locked, shm = report.warnings
    assert "lock 8.0 MiB of memory on b" in locked and "/dev/shm has 64.0 MiB free on b" in shm
    assert "1024 open files, locked memory 8.0 MiB" in report.lines[0]
    assert not said(node.judge_limits, {"a": node.limits()}, 2, False).faults


@pytest.mark.parametrize(("on_gpus", "faults"), [(True, 1), (False, 0)])
def test_cores(on_gpus, faults):
    """Ranks that srun binds to a core each have several; those that share one do not."""
    masks = {"a": [0b0011, 0b1100], "b": [0b1, 0b1]}
    report = said(node.judge_cores, masks, on_gpus)
    assert len(report.faults) == faults and len(report.warnings) == 1 - faults
    assert "2 ranks share 1 CPU core on b" in (report.faults + report.warnings)[0]


def describe(port: int) -> dict:
    return {"resolves": "10.0.0.1", "port": port}


def test_a_node_that_nobody_reaches_is_one_sentence():
    nodes = {name: describe(i) for i, name in enumerate("abcdef")}
    found = {name: {"d": "10.0.0.4: timed out"} for name in "abcef"} | {"d": {}}
    report = said(network.judge_names, nodes, found)
    (fault,) = report.faults
    assert fault.startswith("a, b, c and 2 more cannot reach d:3 (10.0.0.4: timed out): open")
    assert report.result is False


def test_a_fabric_that_is_down_is_not_told_link_by_link():
    names = [f"n{i}" for i in range(100)]
    found = {a: {b: "timed out" for b in names if b != a} for a in names}
    report = said(network.judge_names, {name: describe(1) for name in names}, found)
    assert len(report.faults) == 11
    assert report.faults[-1] == f"{90 * 99} more connections between nodes fail"


def test_names_that_do_not_resolve():
    nodes = {name: describe(i) for i, name in enumerate("abc")}
    nodes["c"]["resolves"] = None
    found = {"a": {}, "b": {"a": "name", "c": "name"}, "c": {"b": "127.0.1.1 is another machine"}}
    assert [fault.split(":")[0] for fault in said(network.judge_names, nodes, found).faults] == [
        "c cannot resolve its own name",
        "b cannot resolve the name a and c",
        "c cannot reach b",
    ]


def test_a_port_of_another_machine_is_not_taken_for_the_node():
    here, other = network.Listener(), network.Listener()
    there = here.describe() | {"host": "localhost", "address": "127.0.0.1"}
    nodes = {"a": there, "b": there | {"token": other.token}, "c": there}
    found = network.visit_all("c", nodes, 5)
    assert found["faults"] == {"b": "127.0.0.1 is another machine"}
    offset, round_trip = found["clock"]
    assert abs(offset) < 0.1 and 0 < round_trip < 1
    for listener in (here, other):
        listener.shutdown()
        listener.server_close()
    gone = network.visit_all("c", nodes, 5)
    assert "Connection refused" in gone["faults"]["a"] and gone["clock"] is None


def test_clocks():
    """An offset is that of the first node's clock, seen from the node."""
    clocks = {"a": (0.0, 0.0), "b": (0.001, 0.002), "c": (-3.2, 0.001), "d": None}
    report = said(network.judge_clocks, clocks)
    assert report.faults == [
        "the clock of c is 3.2 s ahead of the others: start chronyd or ntpd there"
    ]
    ahead = {"a": (0.0, 0.0), "b": (2.0, 0.001), "c": (2.1, 0.001)}
    (fault,) = said(network.judge_clocks, ahead).faults
    assert fault.startswith("the clock of a is 2.0 s ahead of")
    assert not said(network.judge_clocks, {"a": (0.0, 0.0), "b": (1.5, 2.0)}).faults


def test_a_run_directory_that_cannot_be_written(tmp_path):
    token, run_dir = "t", tmp_path / "a" / "run"
    fault, made = node.make_probe(run_dir, token)
    assert fault is None
    answers = {
        "a": node.answer_probe(run_dir, token, "a", 0),
        "b": node.answer_probe(run_dir, "other", "b", 0),
        "c": {"path": str(run_dir), "fault": "Permission denied"},
        "d": {"path": str(run_dir), "fault": None},
    }
    report = said(node.judge_run_dir, run_dir, token, answers, 0)
    assert [fault.split(":")[0] for fault in report.faults] == [
        f"run directory {run_dir} does not show there what rank 0 writes on b",
        f"run directory {run_dir} is not writable on c (Permission denied)",
        f"run directory {run_dir}",
    ]
    assert "does not see what d writes" in report.faults[2]
    node.remove_probe(made)
    assert not (tmp_path / "a").exists()
    (tmp_path / "file").write_text("")
    fault, _ = node.make_probe(tmp_path / "file" / "run", token)
    assert "Not a directory" in fault


def test_space():
    report = said(node.judge_space, 2**30, 10**8)
    text = "1.00 GiB free, and two checkpoints of 100,000,000 parameters take 2.24 GiB"
    assert text in report.warnings[0]
    assert not said(node.judge_space, 2**32, 10**8).warnings


H100 = gpus.Gpu(
    index=0,
    name="NVIDIA H100 80GB HBM3",
    driver="550.54.15",
    total=81559,
    used=4,
    busy=0,
    clock=345,
    max_clock=1980,
    reasons=1,
    ecc=0,
    pids=[],
)
BUSY = {"used": 40213, "busy": 97, "clock": 1410, "reasons": 0x44, "ecc": 2, "pids": [1234, 1240]}
RTX_3090 = {"name": "NVIDIA GeForce RTX 3090", "total": 24576, "clock": 210, "max_clock": 2100}


def test_what_is_wrong_with_gpus():
    unknown = {"reasons": None, "ecc": None}
    devices = [H100, replace(H100, index=1, **BUSY), replace(H100, index=2, **RTX_3090, **unknown)]
    answers = {
        "a": {"gpus": devices, "seen": 3, "ranks": 3},
        "b": {"gpus": [], "seen": 0, "ranks": 3},
    }
    report = said(gpus.judge_gpus, answers)
    busy, ecc, none, model = report.faults
    assert busy.startswith("GPU 1 on a is not idle: 40213 MiB and 97 % in use, by process 1234 and")
    assert ecc.startswith("GPU 1 on a has had 2 uncorrected memory errors")
    assert none.startswith("torch sees 0 GPUs for 3 ranks on b")
    assert model.startswith("the GPU model is NVIDIA GeForce RTX 3090 with 24576 MiB on GPU 2 on a")
    assert report.result is False

    report = said(gpus.judge_loaded_gpus, {"a": devices})
    assert report.faults == [
        "GPU 1 on a is throttled at 1410 of 1980 MHz (hardware thermal slowdown): check cooling "
        "and power, or leave the node out"
    ]
    assert len(report.warnings) == 2  # the others run at idle clocks


def test_a_driver_that_calls_the_reasons_throttling(monkeypatch):
    """Before 535. The library is a stand-in; no machine here has a driver."""

    def unsupported(*_):
        raise pynvml.NVMLError(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)

    def answer(name: str, value: object) -> None:
        monkeypatch.setattr(pynvml, f"nvml{name}", value if callable(value) else lambda *_: value)

    answer("Init", None)
    answer("SystemGetDriverVersion", H100.driver)
    answer("DeviceGetCount", 1)
    answer("DeviceGetHandleByIndex", lambda index: f"handle {index}")
    answer("DeviceGetHandleByUUID", lambda uuid: f"handle {uuid}")
    answer("DeviceGetIndex", H100.index)
    answer("DeviceGetName", H100.name)
    answer("DeviceGetMemoryInfo", SimpleNamespace(total=81559 << 20, used=(5 << 20) - 1))
    answer("DeviceGetUtilizationRates", SimpleNamespace(gpu=0, memory=0))
    answer("DeviceGetClockInfo", 345)
    answer("DeviceGetMaxClockInfo", 1980)
    answer("DeviceGetCurrentClocksEventReasons", unsupported)
    answer("DeviceGetCurrentClocksThrottleReasons", 1)
    answer("DeviceGetTotalEccErrors", 0)
    answer("DeviceGetComputeRunningProcesses", [SimpleNamespace(pid=77)])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert gpus.read_gpus() == [replace(H100, pids=[77])]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,GPU-6a1f")
    assert len(gpus.read_gpus()) == 2
    answer("DeviceGetHandleByUUID", unsupported)
    assert gpus.read_gpus() == []
    answer("Init", unsupported)
    assert gpus.read_gpus() == []


def test_no_gpus():
    report = said(gpus.judge_gpus, {"a": {"gpus": [], "seen": 0, "ranks": 4}})
    assert report.result and report.lines == ["no GPUs: CPU and gloo"] and not report.faults


HOST = {rank: f"n{rank // 2}" for rank in range(8)}


def test_slow_ranks():
    speeds = {rank: {"matmul": 1e11, "copy": 1e10} for rank in HOST}
    speeds[3]["matmul"] = 2e10
    speeds[4]["copy"] = speeds[5]["copy"] = 3e9
    report = said(bandwidth.judge_speed, speeds, HOST, 0.4)
    one, node_2 = report.faults
    assert one.startswith("slow: rank 3 on n1 (matrix multiplication at 20.0 GFLOP/s, 20% of the")
    assert node_2.startswith("slow: every rank on n2 (copy at 3.0 GB/s, 30% of the median)")
    assert report.result == pytest.approx({"n0": 1, "n1": 0.2, "n2": 0.3, "n3": 1})


def test_slow_groups():
    """Only the first rank of a group lists it; the slowest member counts."""
    rows = []
    for first in range(0, 8, 2):
        speed = 1e9 if first == 4 else 4e9
        rows.append([("tp", "all-reduce", [first, first + 1], 4.5e9)])
        rows.append([("tp", "all-reduce", [first], speed)])
    report = said(bandwidth.judge_mesh, rows, HOST, 0.4)
    (fault,) = report.faults
    assert "all-reduce over tp is slow among ranks 4 and 5 on n2: 1.00 GB/s, 25%" in fault
    assert report.lines[1].split()[:5] == ["tp", "all-reduce", "2", "4.00", "GB/s"]


@pytest.mark.parametrize("n", [1, 2, 3, 4, 7, 8])
def test_each_node_meets_its_neighbours(n):
    rounds = bandwidth.ring_rounds(n)
    assert len(rounds) <= (2 if n % 2 == 0 else 3)
    for pairs in rounds:
        nodes = [i for pair in pairs for i in pair]
        assert len(set(nodes)) == len(nodes), "one message at a time"
    met = {frozenset(pair) for pairs in rounds for pair in pairs}
    assert met == {frozenset((i, (i + 1) % n)) for i in range(n) if n > 1}


@pytest.mark.parametrize("n", [3, 4, 8])
def test_a_slow_node_is_told_from_its_neighbours(n):
    slow = n - 2
    rows = [
        [(a, b, 1e9 if slow in (a, b) else 1e10)]
        for pairs in bandwidth.ring_rounds(n)
        for a, b in pairs
    ]
    report = said(bandwidth.judge_nodes, rows, {i: f"n{i}" for i in range(n)}, 0.4)
    (fault,) = report.faults
    assert fault.startswith(f"n{slow} is slow with each of its neighbours: 1.00 GB/s at best, 10%")


def test_who_hangs():
    meeting = preflight_meeting()
    done, wait = {"step": 9, "at": "the end", "mesh": []}, {"step": 4, "at": "all-gather over dp"}
    behind = {"step": 3, "at": "all-reduce over dp"}
    (fault,) = said(checks.judge_progress, {0: wait, 1: behind, 2: done}, meeting).faults
    assert fault.startswith("rank 1 on n0 hangs in all-reduce over dp, and the others wait")
    (fault,) = said(checks.judge_progress, {0: wait, 1: wait}, meeting).faults
    assert fault.startswith("no rank came past all-gather over dp in time")
    failed = behind | {"error": "Connection closed by peer"}
    (fault,) = said(checks.judge_progress, {0: wait, 3: failed}, meeting).faults
    assert fault == "rank 3 on n1 failed in all-reduce over dp: Connection closed by peer"


def preflight_meeting() -> Meeting:
    """Rank 0 of a meeting in which all hosts are known."""
    meeting = Meeting(Launch(0, 8, 0, 2), None, 1.0)
    meeting.host = HOST
    return meeting
