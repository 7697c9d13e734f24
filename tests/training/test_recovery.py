"""Whole runs that are stopped, killed, hung or damaged, and what the next start makes of them."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch

from launch.diagnose import __main__ as diagnose
from tests.ranks import RankError, free_port
from tests.runs import (
    REPO,
    SMALL,
    checkpoint_tensors,
    command,
    curve,
    forked,
    rows,
    run_main,
    train,
)
from tests.stuck import STUCK, named
from tests.torture import flags, torture
from tests.training.checkpoint.test_checkpoint import flip, rewrite

TORCHRUN = ["-m", "torch.distributed.run", "--nproc-per-node", "2"]


def wait_until(condition: Callable[[], object], process: subprocess.Popen) -> None:
    """Wait up to two minutes, and no longer than the process lives."""
    deadline = time.monotonic() + 120
    while not condition() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    assert condition(), process.communicate()[1] if process.poll() is not None else "too slow"


def workers(process: subprocess.Popen) -> list[int]:
    """The ranks that a torchrun has started, in their order."""
    found = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True)
    return [int(pid) for pid in found.stdout.split()]


def status(run_dir: Path) -> dict:
    return json.loads((run_dir / "status.json").read_text())


def steps(run_dir: Path) -> list[int]:
    return [row["step"] for row in rows(run_dir)]


@pytest.fixture
def diagnosis(capsys):
    """What ``python -m launch.diagnose`` says."""

    def call(*argv: object) -> str:
        capsys.readouterr()
        assert diagnose.main([str(word) for word in argv]) == 0
        return capsys.readouterr().out

    return call


@pytest.fixture(scope="module")
def two_checkpoints(launched2, tmp_path_factory):
    """A run of two ranks that has saved steps 2 and 4 of 6."""
    run_dir = tmp_path_factory.mktemp("two") / "run"
    flags = ["--tp", 2, "--steps", 4, "--lr-decay-steps", 6, "--checkpoint-every", 2]
    train(launched2, run_dir, *flags)
    return run_dir


@pytest.fixture
def run_dir(two_checkpoints, tmp_path):
    """A copy of it."""
    shutil.copytree(two_checkpoints, tmp_path / "run")
    return tmp_path / "run"


def test_bfloat16_goes_on_bit_for_bit(launched2, tmp_path):
    """The float32 weights and moments are what is saved."""
    flags = ["--tp", 2, "--dtype", "bfloat16", "--lr-decay-steps", 6]
    train(launched2, tmp_path / "straight", *flags, "--steps", 6)
    train(launched2, tmp_path / "halves", *flags, "--steps", 3)
    train(launched2, tmp_path / "halves", *flags, "--steps", 6)
    assert curve(tmp_path / "halves") == curve(tmp_path / "straight")
    here, there = (
        checkpoint_tensors(tmp_path / d / "checkpoints/step-00000006")
        for d in ("halves", "straight")
    )
    assert all(torch.equal(here[name], there[name]) for name in there)
    assert {t.dtype for t in there.values()} == {torch.float32}


# Signals and limits


SIGNALS = [[signal.SIGHUP, signal.SIGTERM], [signal.SIGINT, signal.SIGUSR1]]


@pytest.mark.parametrize("numbers", SIGNALS, ids=str)
def test_plain_python_stops_at_a_signal_and_goes_on(numbers, tmp_path):
    """One process without a launcher: it saves and exits 0, the same command finishes. Signals
    that come while it saves and leaves change nothing."""
    argv = [*SMALL, "--run-dir", tmp_path, "--steps", 3000, "--lr-decay-steps", 300]
    process = command(*argv)
    wait_until((tmp_path / "metrics.jsonl").exists, process)
    while process.poll() is None:
        for number in numbers:
            process.send_signal(number)
        time.sleep(0.01)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    done = rows(tmp_path)[-1]["step"]
    assert 0 < done < 3000 and f"stopped at step {done}" in out
    found = status(tmp_path)
    assert found["state"] == "stopped" and found["step"] == done
    assert found["reason"] == "a rank received a signal"

    argv[argv.index("--steps") + 1] = done + 5
    code, out, err = forked(*argv)
    assert code == 0, err
    assert f"resumed from {tmp_path}/checkpoints/step-{done:08d}" in out
    assert steps(tmp_path) == list(range(1, done + 6))


@pytest.mark.parametrize("target", ["one rank", "torchrun"])
def test_a_signal_stops_all_ranks_at_one_step(target, tmp_path):
    """SIGUSR1 to one rank, or SIGTERM to torchrun, which passes it on to all and exits 1."""
    argv = [*SMALL, "--tp", 2, "--run-dir", tmp_path, "--steps", 3000]
    process = command(*argv, launcher=TORCHRUN)
    wait_until((tmp_path / "metrics.jsonl").exists, process)
    if target == "torchrun":
        process.send_signal(signal.SIGTERM)
    else:
        os.kill(workers(process)[1], signal.SIGUSR1)
    _, err = process.communicate(timeout=90)
    assert process.returncode == (1 if target == "torchrun" else 0), err
    found, done = status(tmp_path), steps(tmp_path)
    assert found["state"] == "stopped" and found["step"] == done[-1] and "train_llm" not in err
    (saved,) = (tmp_path / "checkpoints").iterdir()
    assert saved.name == f"step-{done[-1]:08d}" and done == list(range(1, done[-1] + 1))


def test_stop_after(launched2, tmp_path):
    flags = ["--tp", 2, "--steps", 100000, "--stop-after", "4s"]
    started = time.monotonic()
    text = train(launched2, tmp_path, *flags)
    assert 3 < time.monotonic() - started < 30
    found, done = status(tmp_path), steps(tmp_path)
    assert found["state"] == "stopped" and "--stop-after" in found["reason"]
    assert found["step"] == done[-1] and f"stopped at step {done[-1]}" in text
    assert (tmp_path / f"checkpoints/step-{done[-1]:08d}/state.json").exists()


# Crashes and hangs


def test_torchrun_restarts_after_a_kill(launched2, tmp_path, diagnosis):
    """Its own restart, with the store of the first attempt, goes on from the last checkpoint."""
    launcher = [*TORCHRUN, "--standalone", "--max-restarts", "2"]
    # The restart is to go on from the newest one, not once more from the one that is named.
    train(launched2, tmp_path, "--steps", 4, "--lr-decay-steps", 40)
    argv = [*SMALL, "--tp", 2, "--run-dir", tmp_path, "--steps", 40, "--checkpoint-every", 5]
    argv += ["--comm-timeout", 10]
    process = command(*argv, "--resume", "step-4", launcher=launcher)
    wait_until(lambda: list(tmp_path.glob("checkpoints/step-0000001?")), process)
    os.kill(workers(process)[1], signal.SIGKILL)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    resumed = [line for line in out.splitlines() if line.startswith("resumed from")]
    assert len(resumed) == 2 and resumed[0].endswith("step-00000004")
    assert int(resumed[1][-8:]) >= 10
    assert steps(tmp_path) == list(range(1, 41))
    # Rank 0 only lost its connection; the one that says so names the one that is gone.
    assert "error on rank 1: rank 1 on " in err and "its process is stopped or gone" in err
    assert err.count("train_llm.py: error") == 1
    # What the first attempt has left is not taken for something of the second.
    assert "left nothing" not in diagnosis(tmp_path)
    found = diagnosis(tmp_path, "--previous")
    assert "Rank 1 on " in found and "has left nothing (stopped, killed" in found
    assert "Rank 0 waits in " in found and ", which rank 1 has not joined" in found


def test_a_stopped_rank_is_named_within_the_timeout(tmp_path, diagnosis):
    argv = [*SMALL, "--tp", 2, "--run-dir", tmp_path, "--steps", 10**6, "--log-every", 50]
    process = command(*argv, "--comm-timeout", 10, launcher=TORCHRUN)
    wait_until((tmp_path / "metrics.jsonl").exists, process)
    # A signal to one rank makes all say where they are, and ends nothing.
    other, stuck = workers(process)
    os.kill(other, signal.SIGUSR2)
    answers = [tmp_path / f"diagnosis/rank-0000{rank}.json" for rank in range(2)]
    wait_until(lambda: all(file.exists() for file in answers), process)
    asked = diagnosis(tmp_path)
    assert "That process lives." in asked and "left nothing" not in asked
    time.sleep(1)
    os.kill(stuck, signal.SIGSTOP)
    started = time.monotonic()
    wait_until(lambda: status(tmp_path)["state"] == "failed", process)
    assert time.monotonic() - started < 10
    wait_until(lambda: "left nothing" in diagnosis(tmp_path), process)
    assert time.monotonic() - started < 11
    os.kill(stuck, signal.SIGKILL)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    said = diagnosis(tmp_path)
    assert "Rank 1 on " in said and "has left nothing (stopped, killed or cut off)" in said
    assert "Rank 0 waits in all_" in said and ", which rank 1 has not joined." in said
    assert f"launch.diagnose {tmp_path} says which rank was where" in err
    found = status(tmp_path)
    assert found["rank"] == 1 and "rank 1 on " in found["error"]
    assert "does not answer" in found["error"] and "Rank 0 waits for it in step" in found["error"]
    (last,) = (int(word) for word in found["error"].split("last in step ")[1].split(",")[:1])
    assert last == found["step"] > 1
    assert err.count("train_llm.py: error") == 1 and found["error"] in err
    assert f"traceback : {found['error']}" in err, "torchrun's report ends with it"


def test_ranks_stop_when_torchrun_is_killed(tmp_path):
    argv = [*SMALL, "--tp", 2, "--run-dir", tmp_path, "--steps", 10**6, "--log-every", 50]
    process = command(*argv, launcher=TORCHRUN)
    wait_until((tmp_path / "metrics.jsonl").exists, process)
    process.kill()
    _, err = process.communicate(timeout=60)  # ends with the ranks, which hold the pipes
    found = status(tmp_path)
    assert found["state"] == "stopped" and found["reason"] == "torchrun has ended", err
    assert (tmp_path / f"checkpoints/step-{found['step']:08d}/state.json").exists()


def hang(argv: list[str], port: int):
    """Rank 1 does not come back from making the batch of step 4."""
    import training.loop

    real = training.loop.train_batch

    def stuck(sequences, step, **kwargs):
        if step == 3 and os.environ["RANK"] == "1":
            time.sleep(10**6)
        return real(sequences, step, **kwargs)

    with mock.patch("training.loop.train_batch", stuck):
        return run_main(argv, port)


def test_a_rank_that_is_behind_is_named(fresh, tmp_path, diagnosis):
    """Its process lives, and so does its pulse; it is the one the others wait for."""
    group = fresh(4)
    argv = [*SMALL, "--run-dir", tmp_path, "--steps", 9, "--tp", 2, "--comm-timeout", 6]
    with pytest.raises(RankError, match="died"):
        group.run(hang, [str(word) for word in argv], free_port())
    found = status(tmp_path)
    assert found["state"] == "failed" and found["rank"] == 1
    assert (
        "rank 1 on " in found["error"]
        and "is behind; last in step 3, waiting for the data" in found["error"]
    )
    said = diagnosis(tmp_path)
    assert "not joined" in said and "left nothing" not in said
    assert "training/loop.py" in diagnosis(tmp_path, "--stacks", 1)


@pytest.mark.parametrize(
    ("layout", "phase", "where"),
    [
        ("2x2", "evaluation", "tests/stuck.py"),
        ("pp2-dp1-tp2", "forward", "tests/stuck.py"),
        ("2x2", "save", "training/checkpoint/saver.py"),
    ],
)
def test_a_rank_that_is_stuck_within_a_phase_is_named(layout, phase, where, tmp_path, diagnosis):
    """The short form of ``python -m tests.stuck``: no phase tells it from the others."""
    found = named(layout, phase, "asleep", tmp_path)
    assert found["state"] == "failed" and found["rank"] == STUCK, found
    assert f"rank {STUCK} on " in found["error"] and f", at {where}:" in found["error"]
    assert f"Rank {STUCK} is in no collective, but at {where}:" in diagnosis(tmp_path)


def fail_on_one(argv: list[str], port: int):
    """Rank 1 raises in step 3, which the others only notice by its absence."""
    import training.loop

    real = training.loop.update

    def broken(*args, step, **kwargs):
        if step == 3 and os.environ["RANK"] == "1":
            raise ValueError("the first error")
        return real(*args, step=step, **kwargs)

    with mock.patch("training.loop.update", broken):
        return run_main(argv, port)


def kill_one(argv: list[str], port: int):
    """Rank 3 is gone in the middle of step 3."""
    import models.layers

    real, calls = models.layers.MLP.forward, []

    def killed(self, x):
        calls.append(1)
        if len(calls) == 20 and os.environ["RANK"] == "3":
            os.kill(os.getpid(), signal.SIGKILL)
        return real(self, x)

    with mock.patch.object(models.layers.MLP, "forward", killed):
        return run_main(argv, port)


def test_a_rank_that_is_lost_within_a_stage_is_named(fresh, tmp_path, diagnosis):
    """torch's pipeline wraps what the survivors see."""
    group = fresh(4)
    argv = [*SMALL, "--run-dir", tmp_path, "--steps", 9, "--tp", 2, "--comm-timeout", 6]
    argv += ["--pp", 2, "--pp-schedule", "interleaved", "--num-hidden-layers", 4]
    with pytest.raises(RankError, match="rank 3: died") as failure:
        group.run(kill_one, [str(word) for word in argv], free_port())
    found = status(tmp_path)
    assert found["rank"] == 3 and found["error"].startswith("rank 3 on "), found
    said = str(failure.value)
    assert said.count("train_llm.py: error") == 1 and "Schedule" not in said
    said = diagnosis(tmp_path)
    assert "Rank 3 on " in said and "has left nothing" in said and "raised" not in said


def test_the_first_error_is_the_one_that_is_seen(fresh, tmp_path, diagnosis):
    group = fresh(4)
    argv = [*SMALL, "--run-dir", tmp_path, "--steps", 9, "--tp", 2, "--checkpoint-every", 1]
    with pytest.raises(RankError) as failure:
        group.run(fail_on_one, [str(word) for word in argv], free_port())
    assert status(tmp_path)["error"] == "ValueError: the first error"
    assert str(failure.value).count("train_llm.py: error") == 1
    # The save that had begun before was finished.
    assert (tmp_path / "checkpoints/step-00000002/state.json").exists()
    said = diagnosis(tmp_path)
    assert "Rank 1 raised ValueError: the first error (at tests/training/test_recovery.py:" in said
    assert "not joined" in said and said.count("raised") == 1
    assert "ValueError: the first error" in diagnosis(tmp_path, "--stacks", 1)


def test_kills_at_random_instants_change_nothing(launched2, tmp_path):
    """The short form of ``python -m tests.torture``."""
    train(launched2, tmp_path / "straight", *flags(processes=2, steps=60))
    assert torture(tmp_path, kills=3, processes=2, steps=60, seed=time.time_ns()) == []


# Damaged and unusual run directories


def test_a_damaged_checkpoint_is_passed_over(run_dir, launched2, two_checkpoints):
    flip(run_dir / "checkpoints/step-00000004", "__1_0.distcp")
    (run_dir / "checkpoints/step-00000008").mkdir()
    (run_dir / "checkpoints/step-100-old").mkdir()
    (run_dir / "checkpoints/latest.tmp").touch()
    argv = [*SMALL, "--run-dir", run_dir, "--tp", 2, "--steps", 6, "--keep-checkpoints", 1]
    process = command(*argv, launcher=TORCHRUN)
    out, err = process.communicate(timeout=90)
    assert process.returncode == 0, err
    damaged = run_dir / "checkpoints/step-00000004"
    fault = "is damaged: __1_0.distcp differs from its checksum"
    assert f"train_llm.py: warning: {damaged} {fault}" in err
    assert f"{damaged} is now step-00000004.unused" in err
    assert f"resumed from {run_dir}/checkpoints/step-00000002" in out
    assert steps(run_dir) == [1, 2, 3, 4, 5, 6] and curve(run_dir)[:4] == curve(two_checkpoints)
    assert sorted(path.name for path in (run_dir / "checkpoints").iterdir()) == [
        "latest.tmp",
        "step-00000002",
        "step-00000004.unused",
        "step-00000006",
        "step-00000008",
        "step-100-old",
    ]


def refused(run_dir: Path, *flags: str | int) -> str:
    """The one line with which a start in ``run_dir`` is refused."""
    code, _, err = forked(*SMALL, "--run-dir", run_dir, "--steps", 6, *flags)
    assert code == 2 and err.count("\n") == 1, err
    return err


def test_no_whole_checkpoint_is_no_reason_to_begin_anew(run_dir):
    before = (run_dir / "metrics.jsonl").read_bytes()
    flip(run_dir / "checkpoints/step-00000004")
    (run_dir / "checkpoints/step-00000002/.metadata").unlink()
    code, _, err = forked(*SMALL, "--run-dir", run_dir, "--steps", 6)
    assert code == 2 and "Traceback" not in err
    assert "holds no whole checkpoint" in err and ".metadata is missing" in err
    assert (run_dir / "metrics.jsonl").read_bytes() == before


def test_a_named_checkpoint_that_is_damaged_is_refused(run_dir):
    flip(run_dir / "checkpoints/step-00000004")
    assert "step-00000004: __0_0.distcp differs" in refused(run_dir, "--resume", "step-4")
    line = refused(run_dir, "--resume", "step-3")
    assert "step-00000003 is not whole" in line and "step-00000002, step-00000004" in line
    assert "is not of the form step-200" in refused(run_dir, "--resume", "latest")


def content(folder: Path) -> dict[str, bytes]:
    """Every file of a run but its lock, by its path."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != ".lock"]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@pytest.mark.skipif(os.geteuid() != 0, reason="needs the right to be another user")
@pytest.mark.parametrize("name", ["checkpoints/step-00000004", "metrics.jsonl"])
def test_what_may_not_be_read_is_not_taken_for_nothing(name, run_dir):
    """A colleague's umask is no reason to begin anew over the colleague's run."""
    with tempfile.TemporaryDirectory() as folder:  # pytest's own folders are its user's
        os.chmod(folder, 0o755)
        shutil.copytree(run_dir, Path(folder, "run"))
        run_dir, before = Path(folder, "run"), content(run_dir)
        for path in (run_dir, *run_dir.rglob("*")):
            os.chown(path, 65534, 65534)
        mode = (run_dir / name).stat().st_mode
        (run_dir / name).chmod(0)
        other = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", sys.executable]
        argv = [*other, "train_llm.py", *SMALL, "--run-dir", run_dir, "--steps", 6]
        environ = os.environ | {"HOME": folder, "PARALLEL_RECIPES_CACHE": f"{folder}/cache"}
        found = subprocess.run(
            [*map(str, argv)], cwd=REPO, env=environ, capture_output=True, text=True
        )
        (run_dir / name).chmod(mode)
        assert found.returncode == 2 and found.stderr.count("\n") == 1, found.stderr
        assert f"{run_dir / name} cannot be read (Permission denied)" in found.stderr
        assert content(run_dir) == before


def test_a_run_directory_that_is_moved_stops_its_job(launched2, tmp_path):
    """It writes nothing into the directory that another job makes at its old path."""
    run_dir, moved = tmp_path / "run", tmp_path / "run.old"
    argv = [*SMALL, "--run-dir", run_dir, "--log-every", 1]
    first = command(*argv, "--steps", 10**6, "--checkpoint-every", 5)
    wait_until(lambda: list(run_dir.glob("checkpoints/step-*")), first)
    shutil.move(run_dir, moved)
    train(launched2, run_dir, "--steps", 3)
    _, err = first.communicate(timeout=60)
    assert first.returncode == 1 and err.count("\n") == 1, err
    assert f"error: --run-dir {run_dir} was moved or replaced" in err
    assert steps(run_dir) == [1, 2, 3] and status(run_dir)["state"] == "finished"
    assert not (run_dir / ".failed").exists()
    assert [path.name for path in (run_dir / "checkpoints").iterdir()] == ["step-00000003"]
    # What it had saved is whole, and goes on.
    saved = int(sorted(moved.glob("checkpoints/step-*"))[-1].name[5:])
    train(launched2, moved, "--steps", saved + 1, "--lr-decay-steps", 10**6)
    assert steps(moved) == list(range(1, saved + 2))


def test_steps_of_nine_digits(run_dir, launched2):
    """They are found, are later than those of eight, and are put aside where a resume goes back."""
    folder = run_dir / "checkpoints"
    long = folder / "step-100000000"
    shutil.move(folder / "step-00000004", long)
    state = json.loads((long / "state.json").read_text()) | {"step": 10**8}
    rewrite("state.json", json.dumps(state).encode())(long)
    flags = ["--tp", 2, "--lr-decay-steps", 6, "--keep-checkpoints", 2]
    text = train(launched2, run_dir, *flags, "--steps", 10**8 + 1)
    assert f"resumed from {long}" in text
    names = ["step-00000002", "step-100000000", "step-100000001"]
    assert sorted(path.name for path in folder.iterdir()) == names[1:]
    assert f"{names[2]} is finished" not in train(
        launched2, run_dir, *flags, "--steps", 10**8 + 1, "--resume", names[1]
    )
    assert sorted(path.name for path in folder.iterdir()) == [*names[1:], f"{names[2]}.unused"]


def test_resume_from_an_earlier_checkpoint(run_dir, launched2, two_checkpoints):
    """What came after it is done again, to the bit, and its checkpoint put aside."""
    text = train(launched2, run_dir, "--tp", 2, "--steps", 5, "--resume", "step-2")
    assert "step-00000002" in text
    assert curve(run_dir)[:4] == curve(two_checkpoints) and steps(run_dir) == [1, 2, 3, 4, 5]
    assert (run_dir / "checkpoints/step-00000004.unused/state.json").exists()


def test_a_stray_folder_does_not_keep_a_step_from_being_saved(launched1, tmp_path):
    """Something of a checkpoint's name that is none is put aside, not mistaken for it."""
    stray = tmp_path / "checkpoints/step-00000004"
    stray.mkdir(parents=True)
    (tmp_path / "checkpoints/step-00000006").touch()
    (tmp_path / "checkpoints/latest.tmp").touch()
    train(launched1, tmp_path, "--steps", 6, "--checkpoint-every", 2, "--keep-checkpoints", 0)
    complete = [p.parent.name for p in sorted(tmp_path.glob("checkpoints/step-*/state.json"))]
    assert complete == ["step-00000002", "step-00000004", "step-00000006"]


@pytest.fixture
def small_disk(tmp_path):
    """A disk of 1.8 MB, on which a checkpoint of the small model takes 0.5 MB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1800k", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("needs the right to mount a tmpfs")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_a_full_disk(small_disk):
    """Training goes on without saves; the last one counts for the exit code and status.json."""
    run_dir = small_disk / "run"
    argv = ["--steps", 30, "--checkpoint-every", 2, "--keep-checkpoints", 0]
    code, out, err = forked(*SMALL, "--run-dir", run_dir, *argv)
    assert code == 1 and "Traceback" not in err
    said = [line for line in err.splitlines() if line.startswith("train_llm.py: ")]
    assert "cannot be written: OSError: [Errno 28] No space left" in said[0]
    assert said[0].endswith("training goes on") and len(said) > 10
    assert not any("step-00000030" in line and "goes on" in line for line in said)
    assert "error on rank 0" in said[-1] and "step-00000030 cannot be written" in said[-1]
    assert "step 30/30" in out and steps(run_dir) == list(range(1, 31))
    assert status(run_dir)["state"] == "failed"
    saved = sorted(run_dir.glob("checkpoints/*"))
    assert saved and checkpoint_tensors(saved[-1])

    # With more room, the same command goes on.
    subprocess.run(["mount", "-o", "remount,size=20m", small_disk], check=True)
    process = command(*SMALL, "--run-dir", run_dir, *argv)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert f"resumed from {saved[-1]}" in out and steps(run_dir) == list(range(1, 31))
    assert status(run_dir)["state"] == "finished"


def test_a_disk_that_recovers(small_disk):
    """A save that failed is no failure of the run once a later one succeeds."""
    run_dir = small_disk / "run"
    argv = ["--steps", 10**5, "--checkpoint-every", 10, "--keep-checkpoints", 1]
    process = command(*SMALL, "--run-dir", run_dir, *argv)
    wait_until(lambda: list(run_dir.glob("checkpoints/step-*")), process)
    (small_disk / "ballast").write_bytes(b"0" * 10**6)
    wait_until(lambda: "checkpoint_fault" in status(run_dir), process)
    assert "No space left" in status(run_dir)["checkpoint_fault"]
    (small_disk / "ballast").unlink()
    wait_until(lambda: "checkpoint_fault" not in status(run_dir), process)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 0 and "checkpoints can be written again" in err
    assert status(run_dir)["state"] == "stopped"


def test_a_disk_that_becomes_read_only(small_disk):
    """Training goes on; the exit code says that the last step is not saved."""
    run_dir = small_disk / "run"
    argv = ["--steps", 10**5, "--checkpoint-every", 10, "--keep-checkpoints", 1]
    process = command(*SMALL, "--run-dir", run_dir, *argv)
    wait_until(lambda: list(run_dir.glob("checkpoints/step-*")), process)
    subprocess.run(["mount", "--bind", small_disk, small_disk], check=True)
    subprocess.run(["mount", "-o", "remount,ro,bind", small_disk], check=True)
    time.sleep(1)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    subprocess.run(["umount", small_disk], check=True)
    assert process.returncode == 1 and "Traceback" not in err
    assert "Read-only file system" in err and "training goes on" in err
    assert "error on rank 0" in err


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_full_terminal_log(stream, tmp_path):
    """What a job prints often goes to the disk that is full."""
    with open("/dev/full", "w") as full:
        argv = [sys.executable, "train_llm.py", *SMALL, "--run-dir", tmp_path, "--steps", 4]
        streams = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL} | {stream: full}
        assert subprocess.run([*map(str, argv)], cwd=REPO, **streams).returncode == 0
    assert steps(tmp_path) == [1, 2, 3, 4] and status(tmp_path)["state"] == "finished"


def test_a_read_only_run_directory(small_disk):
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    line = refused(small_disk / "run")
    assert f"--run-dir {small_disk / 'run'} is not writable (Read-only file system)" in line
