"""Kill a run with SIGKILL at random instants until it is finished, and compare it with one that
nobody touched.

    python -m tests.torture --kills 30 --processes 2

Each time the same torchrun command starts it again. The kills fall into the start (reading the
checkpoint, cutting the metrics back), into steps, into saves, and around the rename that commits a
checkpoint; half of them hit one rank and half all of them and torchrun.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch

from tests.ranks import free_port
from tests.runs import SMALL, checkpoint_tensors, curve, read_wandb, rows

REPO = Path(__file__).parent.parent
WHEN = ("start", "step", "save", "rename")


def flags(processes: int, steps: int) -> list[str | int]:
    """Saving every second step, so that most instants are in or near a save."""
    found = ["--tp", processes, "--steps", steps, "--checkpoint-every", 2]
    return [*found, "--eval-every", 5, "--eval-batches", 1]


def command(run_dir: Path, processes: int, steps: int) -> list[str]:
    """One start of the run."""
    launcher = ["-m", "torch.distributed.run", f"--master-port={free_port()}"]
    words = [*launcher, "--nproc-per-node", processes, "train_llm.py", *SMALL]
    words += [*flags(processes, steps), "--run-dir", run_dir.resolve(), "--wandb", "offline"]
    return [sys.executable, *map(str, words)]


def _start(run_dir: Path, processes: int, steps: int) -> subprocess.Popen:
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    argv = command(run_dir, processes, steps)
    return subprocess.Popen(argv, cwd=REPO, start_new_session=True, **quiet)


def _wait_for(when: str, run_dir: Path, process: subprocess.Popen, chance: random.Random) -> None:
    """Return at an instant of the kind ``when``, or when the process has ended."""

    def until(condition) -> None:
        while process.poll() is None and not condition():
            time.sleep(0.001)

    def seen() -> set[Path]:
        return set(run_dir.glob("checkpoints/step-*"))

    if when == "start":
        # From the first import to the first step.
        end = time.monotonic() + chance.uniform(0, 12)
        until(lambda: time.monotonic() > end)
        return
    before, metrics = seen(), run_dir / "metrics.jsonl"
    size = metrics.stat().st_size if metrics.exists() else 0
    until(lambda: metrics.exists() and metrics.stat().st_size > size)
    if when == "step":
        time.sleep(chance.uniform(0, 1))
    elif when == "save":
        until(lambda: any(run_dir.glob("checkpoints/.step-*.partial")))
        time.sleep(chance.uniform(0, 0.05))
    else:
        until(lambda: seen() - before)


def _kill(process: subprocess.Popen, chance: random.Random) -> None:
    children = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True)
    ranks = [int(pid) for pid in children.stdout.split()]
    if ranks and chance.random() < 0.5:
        os.kill(chance.choice(ranks), signal.SIGKILL)
        process.wait()
        return
    for pid in [process.pid, *ranks]:
        os.kill(pid, signal.SIGKILL)
    process.wait()


def torture(base: Path, kills: int, processes: int, steps: int, seed: int) -> list[str]:
    """Run it with kills; what differs from the run in ``base / "straight"``, in words: nothing if
    all is well."""
    chance, run_dir = random.Random(seed), base / "killed"
    for number in range(kills):
        when = WHEN[number % len(WHEN)]
        process = _start(run_dir, processes, steps)
        _wait_for(when, run_dir, process, chance)
        finished = process.poll() is not None
        if not finished:
            _kill(process, chance)
        done = rows(run_dir)[-1]["step"] if (run_dir / "metrics.jsonl").exists() else 0
        print(f"kill {number + 1}: {'too late' if finished else when}, at step {done}", flush=True)
    subprocess.run(command(run_dir, processes, steps), cwd=REPO, check=True)
    return differences(run_dir, base / "straight")


def differences(run_dir: Path, straight: Path) -> list[str]:
    """What a run that was killed has other than one that was not."""
    found = []
    if curve(run_dir) != curve(straight):
        found.append("metrics.jsonl")
    if (run_dir / "eval.jsonl").read_bytes() != (straight / "eval.jsonl").read_bytes():
        found.append("eval.jsonl")
    here, there = (
        checkpoint_tensors(sorted(folder.glob("checkpoints/step-*"))[-1])
        for folder in (run_dir, straight)
    )
    if not (here.keys() == there.keys() and all(torch.equal(here[k], there[k]) for k in there)):
        found.append("weights or moments")
    history = read_wandb(run_dir)
    if len(set(history.ids)) != 1:
        found.append(f"wandb ids {set(history.ids)}")
    for kind, file in (("loss", "metrics.jsonl"), ("eval_loss", "eval.jsonl")):
        logged = [(row["step"], row[kind]) for row in history.rows if kind in row]
        if sorted(logged) != [(row["step"], row[kind]) for row in rows(run_dir, file)]:
            found.append(f"wandb's {kind}")
    counter = [row["_step"] for row in history.rows]
    if counter != sorted(set(counter)):
        found.append("wandb's own steps go backwards")
    if json.loads((run_dir / "status.json").read_text())["state"] != "finished":
        found.append("status.json")
    strays = [p.name for p in (run_dir / "checkpoints").iterdir() if p.name[:5] != "step-"]
    if strays:
        found.append(f"left behind: {strays}")
    return found


def main() -> None:
    """The whole torture; exit code 1 if anything differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/torture"))
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    shutil.rmtree(options.out, ignore_errors=True)
    options.out.mkdir(parents=True)
    straight = command(options.out / "straight", options.processes, options.steps)
    subprocess.run(straight, cwd=REPO, check=True)
    found = torture(options.out, options.kills, options.processes, options.steps, options.seed)
    print("; ".join(found) if found else "equal to the run that was not killed")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
