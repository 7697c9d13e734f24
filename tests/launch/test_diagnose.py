"""What ``python -m launch.diagnose`` says of runs that hang, fail, go on or have ended."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import pytest

from common.text import rank_ranges
from launch.diagnose.__main__ import main
from tests.ranks import RankError, free_port
from tests.runs import REPO, SMALL, run_main
from training.run.directory import RunDir
from training.run.logs import rank_logger


def record(rank: int, **fields) -> dict:
    """What a rank leaves that waits for number 9 of tp in groups of 8."""
    members = rank_ranges(range(rank // 8 * 8, rank // 8 * 8 + 8))
    frames = ["/torch/_ops.py:1 call", "parallel/tensor_parallel.py:28 _all_reduce"]
    return {
        "rank": rank,
        "host": f"node{rank // 8:03d}",
        "pid": 1000 + rank,
        "time": 1e9 + rank / 1e3,
        "request": 1,
        "step": 5,
        "phase": "forward and backward",
        "threads": [{"name": "MainThread", "frames": frames}],
        "collectives": [collective("gloo:all_reduce", 9, "scheduled")],
        "groups": {"3": {"dim": "tp", "ranks": members, "last": 9}},
    } | fields


def collective(op: str, number: int, state: str = "completed", size: int = 64, **fields) -> dict:
    return {
        "group": "3",
        "op": op,
        "number": number,
        "p2p": False,
        "state": state,
        "sizes": [[[4, size]], [[4, size]]],
        "dtypes": ["Float"],
        "time": 1e9,
    } | fields


def make_run(path: Path, world_size: int, records: list[dict], state: str = "failed") -> Path:
    """The run directory of ranks of which ``records`` are left."""
    run = RunDir(path)
    run.diagnosis.mkdir(parents=True)
    hosts = {f"node{i:03d}": f"{8 * i}-{8 * i + 7}" for i in range(world_size // 8)}
    start = {"world_size": world_size, "hosts": hosts}
    run.run_json.write_text(json.dumps({"starts": [start]}))
    status = {"state": state, "time": 1e9, "host": "node000", "pid": 1, "rank": 3, "step": 5}
    run.status_json.write_text(json.dumps(status | {"error": "rank 3 does not answer"}))
    for each in records:
        run.diagnosis_file(each["rank"]).write_text(json.dumps(each))
    beats = [[50, 20, 5, "forward and backward", f"node{r // 8:03d}"] for r in range(world_size)]
    (run.diagnosis / "beats.json").write_text(json.dumps({"request": 1, "beats": beats}))
    return path


@pytest.fixture
def diagnose(capsys):
    def call(*argv: object) -> str:
        capsys.readouterr()
        assert main([str(word) for word in argv]) == 0
        return capsys.readouterr().out

    return call


# Ranks that hang or fail together are tested where they do, in test_recovery.py.


def desync(argv: list[str], port: int):
    """Rank 1 gathers over tp in step 3 where the other one sums."""
    import torch
    import torch.distributed as dist

    import training.loop

    real, steps = training.loop.forward_backward, []

    def astray(engine, batch, target_tokens):
        steps.append(len(steps))
        if len(steps) == 3 and os.environ["RANK"] == "1":
            parts = [torch.empty(5), torch.empty(5)]
            dist.all_gather(parts, torch.ones(5), group=engine.ranks.mesh.get_group("tp"))
        return real(engine, batch, target_tokens)

    with mock.patch("training.loop.forward_backward", astray):
        return run_main(argv, port)


def test_ranks_in_different_collectives(diagnose, fresh, tmp_path):
    """All stand in the same phase: the timeout of the collective ends them, not the heartbeat."""
    group = fresh(4)
    argv = [*SMALL, "--run-dir", tmp_path, "--steps", 9, "--tp", 2, "--comm-timeout", 4]
    with pytest.raises(RankError, match="died"):
        group.run(desync, [str(word) for word in argv], free_port())
    text = diagnose(tmp_path)
    assert "DESYNC in tp (ranks 0-1), number " in text
    assert "rank 1 called all_gather of [5] Float" in text
    assert "Rank 1 waits in all_gather of tp (ranks 0-1)" in text
    assert "rank 0 called all_reduce of [4, 32, 32] Float" in text


def test_a_crash_of_the_interpreter_leaves_its_stacks(diagnose, tmp_path):
    """A log holds the crashes of earlier starts, too."""
    code = """
import ctypes, pathlib, sys
from types import SimpleNamespace
from training.run.diagnosis import Diagnosis
from training.run.directory import RunDir
diagnosis = Diagnosis(RunDir(pathlib.Path(sys.argv[1])), SimpleNamespace(rank=0, mesh=None))
ctypes.string_at(0)
"""
    run = make_run(tmp_path / "run", 1, [])
    rank_logger(RunDir(run).log_file(0), 0).info("started on here as cpu")
    crash = subprocess.run([sys.executable, "-c", code, run], cwd=REPO, capture_output=True)
    assert crash.returncode == -signal.SIGSEGV
    text = diagnose(run)
    assert "Rank 0 crashed: Segmentation fault (at File" in text and "in string_at" in text
    assert "in string_at" in diagnose(run, "--stacks", 0)
    rank_logger(RunDir(run).log_file(0), 0).info("started on here as cpu")
    assert "crashed" not in diagnose(run)


def test_512_ranks_are_a_few_lines(diagnose, tmp_path):
    """One rank has not answered, its group waits for it, and all others for one of that group."""
    waiting = [record(rank) for rank in range(512) if rank not in (2, 3)]
    gone = record(2, request=0)  # on an earlier request
    for each in waiting[6:]:
        each["collectives"] = [collective("gloo:all_gather", 4, "scheduled", group="5")]
        each["groups"]["5"] = {"dim": "dp", "ranks": "0-511", "last": 4}
    started = time.monotonic()
    text = diagnose(make_run(tmp_path / "run", 512, [*waiting, gone]))
    assert time.monotonic() - started < 3
    print(text)
    assert len(text.splitlines()) < 14 and max(map(len, text.splitlines())) < 160
    assert "Ranks 2-3 on node000 have left nothing" in text
    assert "last heard in step 5, forward and backward" in text
    joined = "number 9, which ranks 2-3 have not joined"
    assert f"Ranks 0-1, 4-7 wait in all_reduce of tp (ranks 0-7), {joined}." in text
    assert "Ranks 8-511 wait in all_gather of dp (ranks 0-511), number 4, which ranks 0-7 " in text
    assert text.count("8-511") == 2 and text.count("node001 and 62 more") == 1


def test_a_size_that_differs(diagnose, tmp_path):
    """Also in a collective that has ended; one that is shorter on record is none."""
    records = [record(rank) for rank in range(8)]
    for rank in range(8):
        size = 65 if rank == 6 else 64
        records[rank]["collectives"].insert(0, collective("nccl:all_reduce", 8, size=size))
    records[2]["collectives"].pop(0)
    text = diagnose(make_run(tmp_path / "run", 8, records))
    assert (
        "DESYNC in tp (ranks 0-7), number 8: ranks 0-1, 3-5, 7 called all_reduce of [4, 64]" in text
    )
    assert "rank 6 called all_reduce of [4, 65] Float" in text


def test_nothing_recorded_and_files_that_are_damaged(diagnose, tmp_path):
    run = make_run(tmp_path / "run", 8, [record(0, collectives=None, groups={})])
    RunDir(run).diagnosis_file(1).write_text('{"rank": 1')
    text = diagnose(run)
    assert "not recorded" in text and "Cannot be read: rank-00001.json" in text
    assert "MainThread:" in diagnose(run, "--stacks", 0)
    assert main([str(run), "--stacks", "5"]) == 1


def test_what_is_said_without_a_diagnosis(diagnose, capsys, tmp_path):
    """Of a directory without a run, one that runs, was killed, has finished, and failed early."""
    assert main([str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    run = RunDir(tmp_path)
    run.config_toml.touch()
    assert "no start has got as far" in diagnose(tmp_path)
    run.write_status("running")
    run.metrics_jsonl.write_text('{"step": 7}\n')
    text = diagnose(tmp_path)
    assert f"`kill -USR2 {os.getpid()}`" in text and "last logged step is 7" in text
    child = subprocess.run(
        [sys.executable, "-c", "import os; print(os.getpid())"], text=True, capture_output=True
    )
    status = {"state": "running", "time": time.time(), "host": socket.gethostname()}
    run.status_json.write_text(json.dumps(status | {"pid": int(child.stdout)}))
    assert "That process is gone without a word" in diagnose(tmp_path)
    run.status_json.write_text(json.dumps(status | {"pid": 1, "host": "node007"}))
    assert "`kill -USR2 1` on node007" in diagnose(tmp_path)
    run.write_status("finished", step=9)
    assert "finished at step 9" in diagnose(tmp_path)
    run.write_status("failed", rank=0, step=None, error="it broke")
    assert "No rank has left a diagnosis" in diagnose(tmp_path)


def test_torch_is_not_imported(tmp_path):
    run = make_run(tmp_path / "run", 8, [record(0)])
    code = "import sys; from launch.diagnose.__main__ import main; main(sys.argv[1:])"
    code += "; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code, run], cwd=REPO, check=True, capture_output=True)
