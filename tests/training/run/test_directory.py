"""The run directory: one job at a time, the first failure, whole files, the identity on wandb."""

import errno
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from common.errors import ConfigError
from common.files import write_atomic
from training.run.directory import RunDir
from training.run.logs import rank_logger

HOLD = """
import sys, time
from pathlib import Path
from training.run.directory import RunDir
RunDir(Path(sys.argv[1])).lock()
print("held", flush=True)
time.sleep(60)
"""


@pytest.fixture
def run_dir(tmp_path):
    run_dir = RunDir(tmp_path / "runs" / "debug")
    run_dir.lock()
    yield run_dir
    run_dir.unlock()


def in_children(count, function):
    """Fork, start all at once, and return the exit codes."""
    ready, go = os.pipe()
    children = []
    for i in range(count):
        child = os.fork()
        if child == 0:
            code = 99
            try:
                os.close(go)
                os.read(ready, 1)
                code = function(i)
            finally:
                os._exit(code)
        children.append(child)
    os.close(ready)
    os.close(go)
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def temporary_files(run_dir):
    return list(run_dir.path.rglob("*.tmp"))


def test_import_leaves_torch_out():
    code = "import sys, training.run.directory; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_paths(tmp_path):
    run_dir = RunDir(tmp_path / "x")
    assert run_dir.log_file(3) == tmp_path / "x/logs/rank-00003.log"
    assert run_dir.checkpoints == tmp_path / "x/checkpoints"
    assert not run_dir.path.exists()


def test_second_job_is_refused_and_a_kill_releases(tmp_path):
    path = tmp_path / "run"
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(ConfigError) as refusal:
            RunDir(path).lock()
        text = str(refusal.value)
        assert str(path) in text and str(holder.pid) in text and os.uname().nodename in text
        assert "name another directory" in text and "\n" not in text
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.wait()
    again = RunDir(path)
    again.lock()
    assert (path / ".lock").read_text().split() == [os.uname().nodename, str(os.getpid())]
    again.unlock()


def test_a_forked_child_neither_keeps_nor_breaks_the_lock(tmp_path):
    path = tmp_path / "run"
    first = RunDir(path)
    first.lock()
    ready, go = os.pipe()
    alive, tell = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(go)
        os.write(tell, b".")
        os.read(ready, 1)
        os._exit(0)
    os.read(alive, 1)
    try:
        # The child lives and has let go of its copy; the lock is still this process's.
        with pytest.raises(ConfigError):
            RunDir(path).lock()
        first.unlock()
        second = RunDir(path)
        second.lock()
        second.unlock()
    finally:
        for fd in (go, ready, alive, tell):
            os.close(fd)
        os.waitpid(child, 0)


def test_unwritable_directory_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"--run-dir .* is not writable") as refusal:
        RunDir(tmp_path / "file" / "run").lock()
    assert "\n" not in str(refusal.value)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_read_only_directory_is_one_line(tmp_path):
    tmp_path.chmod(0o555)
    with pytest.raises(ConfigError, match="Permission denied"):
        RunDir(tmp_path).lock()
    tmp_path.chmod(0o755)


def test_starts_accumulate_and_a_corrupt_record_is_put_aside(run_dir):
    run_dir.record_start({"world": 1})
    run_dir.record_start({"world": 2})
    assert json.loads(run_dir.run_json.read_text())["starts"] == [{"world": 1}, {"world": 2}]
    run_dir.run_json.write_text('{"starts": [')
    run_dir.record_start({"world": 4})
    assert json.loads(run_dir.run_json.read_text())["starts"] == [{"world": 4}]
    assert run_dir.path.joinpath("run.json.corrupt").read_text() == '{"starts": ['
    run_dir.run_json.unlink()
    run_dir.record_start({"world": 8})
    assert json.loads(run_dir.run_json.read_text())["starts"] == [{"world": 8}]


def test_wandb_id_survives_a_resume_but_not_a_copy(run_dir, tmp_path):
    first = run_dir.wandb_id()
    assert len(first) >= 8 and first.isalnum() and first == first.lower()
    run_dir.record_start({})
    assert RunDir(run_dir.path).wandb_id() == first
    shutil.copytree(run_dir.path, tmp_path / "fork")
    fork = RunDir(tmp_path / "fork")
    second = fork.wandb_id()
    assert second != first and fork.wandb_id() == second
    assert RunDir(run_dir.path).wandb_id() == first
    run_dir.run_json.unlink()
    assert run_dir.wandb_id() not in (first, second)


def test_status(run_dir):
    assert run_dir.read_status() is None
    run_dir.write_status("stopped", why="signal", step=7)
    status = run_dir.read_status()
    assert status["state"] == "stopped" and status["why"] == "signal" and status["step"] == 7
    assert status["pid"] == os.getpid() and status["host"] and status["time"] > 1.7e9
    run_dir.status_json.write_text("{")
    assert run_dir.read_status() is None


def test_a_reader_never_sees_half_a_status(run_dir):
    run_dir.write_status("running", note="")
    stop = threading.Event()

    def write():
        for i in range(150):
            run_dir.write_status("running", note=str(i % 10) * (20000 if i % 2 else 1))
        stop.set()

    writer = threading.Thread(target=write)
    writer.start()
    reads = 0
    while not stop.is_set():
        status = json.loads(run_dir.status_json.read_text())
        assert len(set(status["note"])) <= 1
        reads += 1
    writer.join()
    assert reads > 10 and not temporary_files(run_dir)


def test_exactly_one_failure_wins(run_dir):
    run_dir.write_status("running")
    codes = in_children(8, lambda rank: RunDir(run_dir.path).fail(rank, 3, f"error of {rank}"))
    assert sorted(codes) == [0] * 7 + [1]
    status = run_dir.read_status()
    winner = codes.index(1)
    assert (status["state"], status["rank"], status["step"]) == ("failed", winner, 3)
    assert status["error"] == f"error of {winner}"
    # What rank 0 says later, or another rank, does not hide the first failure.
    run_dir.write_status("running")
    run_dir.write_status("stopped")
    assert not run_dir.fail(99, 4, "a broken connection")
    assert run_dir.read_status() == status and not temporary_files(run_dir)


def test_the_next_start_can_fail_anew(run_dir):
    assert run_dir.fail(1, 3, "first start")
    run_dir.unlock()
    again = RunDir(run_dir.path)
    again.lock()
    again.write_status("running")
    assert again.read_status()["state"] == "running"
    assert again.fail(2, 5, "second start")
    assert again.read_status()["error"] == "second start"
    again.unlock()


def test_fail_never_raises(tmp_path):
    # Nothing can be written there, so that this rank has to say it on the terminal.
    assert RunDir(tmp_path / "gone").fail(0, None, "whatever")


def test_cut_metrics_keeps_the_bytes_of_earlier_steps(run_dir):
    kept = b'{"step":1,  "loss": 1.50}\n{"step": 2, "loss": null}\n'
    run_dir.metrics_jsonl.write_bytes(kept + b'{"step": 3, "loss": 1}\n{"step": 4, "lo')
    run_dir.eval_jsonl.write_bytes(b'{"step": 2, "eval_loss": 1}\n{"step": 4, "eval_loss": 1}\n')
    run_dir.cut_metrics(2)
    assert run_dir.metrics_jsonl.read_bytes() == kept
    assert run_dir.eval_jsonl.read_bytes() == b'{"step": 2, "eval_loss": 1}\n'
    before = run_dir.metrics_jsonl.stat().st_ino
    run_dir.cut_metrics(2)
    assert run_dir.metrics_jsonl.stat().st_ino == before
    run_dir.cut_metrics(0)
    assert run_dir.metrics_jsonl.read_bytes() == b"" == run_dir.eval_jsonl.read_bytes()


@pytest.mark.parametrize(
    "torn", [b'{"step": 1', b'{"step": 1}garbage', b"\0" * 64, b"\xff\xfe", b"1"]
)
def test_cut_metrics_drops_a_torn_last_line(run_dir, torn):
    run_dir.metrics_jsonl.write_bytes(b'{"step": 1}\n' + torn)
    run_dir.cut_metrics(9)
    assert run_dir.metrics_jsonl.read_bytes() == b'{"step": 1}\n'


@pytest.mark.parametrize(
    "line",
    [
        b'{"step": 1, "x": ' + b"[" * 10**5,
        b'{"step": 1, "x": "\xed\xa0\x80"}',
        b'{"step": true}',
        b'{"step": 1e400}',
        b'{"step": NaN}',
        b'{"step": -5}',
    ],
    ids=["nested", "surrogate", "true", "infinite", "nan", "negative"],
)
def test_cut_metrics_drops_what_no_training_has_written(run_dir, line):
    run_dir.metrics_jsonl.write_bytes(b'{"step": 1}\n' + line + b'\n{"step": 2}\n')
    run_dir.cut_metrics(9)
    assert run_dir.metrics_jsonl.read_bytes() == b'{"step": 1}\n{"step": 2}\n'


@pytest.mark.parametrize("text", ["[1]", '{"starts": 5}', "[" * 10**5, '"' + "x" * 100, "NaN"])
def test_a_record_of_another_kind_is_put_aside(run_dir, text):
    run_dir.run_json.write_text(text)
    assert run_dir.starts() == 0 and not run_dir.begun_by("job 1")
    first = run_dir.wandb_id()
    run_dir.record_start({"launch": 7})
    assert run_dir.starts() == 1 and run_dir.wandb_id() == first and not run_dir.begun_by("7")
    assert run_dir.path.joinpath("run.json.corrupt").read_text() == text


FILES = [".lock", "run.json", "status.json", "config.toml", "metrics.jsonl", "eval.jsonl"]


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir], ids=["FIFO", "folder"])
@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_none_is_one_line(name, make, tmp_path):
    make(tmp_path / name)
    run_dir = RunDir(tmp_path)
    with pytest.raises(ConfigError, match=f"{name} is no regular file: remove it"):
        run_dir.lock()
        run_dir.check_readable()
    run_dir.unlock()


def test_a_lock_that_leads_elsewhere_is_left_alone(tmp_path):
    (tmp_path / "precious").write_text("mine")
    (tmp_path / ".lock").symlink_to("precious")
    with pytest.raises(ConfigError, match=r"\.lock is no regular file"):
        RunDir(tmp_path).lock()
    assert (tmp_path / "precious").read_text() == "mine"


def broken_link(folder):
    folder.symlink_to("nowhere")


def link_loop(folder):
    folder.symlink_to(folder.name)


@pytest.mark.parametrize("below", ["run/checkpoints", "run"])
@pytest.mark.parametrize("make", [broken_link, link_loop, Path.touch])
def test_checkpoints_behind_something_that_is_no_folder(make, below, tmp_path):
    (tmp_path / below).parent.mkdir(exist_ok=True)
    make(tmp_path / below)
    with pytest.raises(ConfigError, match=below) as refusal:
        RunDir(tmp_path / "run").newest_checkpoint()
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EACCES, errno.ENOTCONN])
@pytest.mark.parametrize("call", ["listdir", "lstat"])
def test_a_disk_that_fails_holds_no_less(call, number, tmp_path, monkeypatch):
    step = tmp_path / "checkpoints/step-00000001"
    step.mkdir(parents=True)
    (step / "SHA256SUMS").touch()

    def fail(path, **_):
        raise OSError(number, os.strerror(number), str(path))

    run_dir = RunDir(tmp_path)
    assert run_dir.newest_checkpoint() is None
    monkeypatch.setattr(os, call, fail)
    with pytest.raises(ConfigError, match=os.strerror(number)):
        run_dir.newest_checkpoint()


@pytest.mark.parametrize(
    "change, lost",
    [
        (lambda path: path.rename(path.with_name("moved")), True),
        (lambda path: path.parent.rename(path.parent.with_name("elsewhere")), True),
        (lambda path: shutil.rmtree(path), True),
        (lambda path: (path / ".lock").unlink(), True),
        (lambda path: ((path / ".lock").unlink(), (path / ".lock").touch()), True),
        (lambda path: path.rename(path.with_name("a")).rename(path), False),
        (lambda path: (path / ".lock").write_text("other"), False),
    ],
    ids=["moved", "parent moved", "removed", "lock removed", "lock replaced", "back", "written"],
)
def test_a_directory_that_is_not_its_own_any_more(run_dir, change, lost):
    other = RunDir(run_dir.path)
    other.join()
    assert not run_dir.is_lost() and not other.is_lost()
    change(run_dir.path)
    assert run_dir.is_lost() == other.is_lost() == lost
    if lost:
        assert other.fail(1, 3, "whatever") and run_dir.fail(0, 3, "whatever")
        with pytest.raises(OSError, match="moved or replaced"):
            run_dir.write_status("running")
        assert not run_dir.status_json.exists() and not run_dir.has_failed()
    other.unlock()


def test_cut_metrics_closes_a_whole_last_line(run_dir):
    run_dir.metrics_jsonl.write_bytes(b'{"step": 1}\n{"step": 2}')
    run_dir.cut_metrics(2)
    assert run_dir.metrics_jsonl.read_bytes() == b'{"step": 1}\n{"step": 2}\n'


@pytest.mark.parametrize("broken", ["fsync", "replace"])
def test_a_failed_cut_leaves_the_old_file(run_dir, monkeypatch, broken):
    old = b'{"step": 1}\n{"step": 2}\n'
    run_dir.metrics_jsonl.write_bytes(old)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, broken, full)
    with pytest.raises(OSError):
        run_dir.cut_metrics(1)
    assert run_dir.metrics_jsonl.read_bytes() == old and not temporary_files(run_dir)


def test_cut_metrics_of_a_new_run(run_dir):
    run_dir.cut_metrics(0)
    assert not run_dir.metrics_jsonl.exists() and not run_dir.eval_jsonl.exists()


def test_write_atomic_syncs_before_it_replaces(tmp_path, monkeypatch):
    calls = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda fd: (calls.append("fsync"), fsync(fd)))
    monkeypatch.setattr(os, "replace", lambda a, b: (calls.append("replace"), replace(a, b)))
    write_atomic(tmp_path / "a.json", "é\n")
    assert calls == ["fsync", "replace", "fsync"]
    assert (tmp_path / "a.json").read_bytes() == "é\n".encode()


def test_rank_logger_writes_to_its_own_file_only(tmp_path, capfd):
    run_dir = RunDir(tmp_path)
    logger = rank_logger(run_dir.log_file(3), 3)
    logger.info("hello")
    rank_logger(run_dir.log_file(3), 3).warning("again")
    lines = run_dir.log_file(3).read_text().splitlines()
    assert [line.split(" rank=3 ")[1] for line in lines] == ["INFO hello", "WARNING again"]
    rank_logger(run_dir.log_file(0), 0).info("other")
    assert len(run_dir.log_file(3).read_text().splitlines()) == 2
    assert capfd.readouterr() == ("", "")
    assert logger is logging.getLogger("parallel_recipes") and len(logger.handlers) == 1
    logger.handlers.pop().close()


def test_no_secret_of_an_error_is_written(run_dir, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_very_secret")
    text = "401 for hf_very_secret at https://me:very@host/x"
    run_dir.fail(0, 3, text)
    rank_logger(run_dir.log_file(0), 0).error(text)
    files = [path.read_text() for path in (run_dir.status_json, run_dir.log_file(0))]
    assert all("401 for *** at https://***@host/x" in said for said in files)
    assert not any("very" in said for said in files)
