"""Say from the files of a run which rank was where when it hung or failed.

    python -m launch.diagnose runs/debug

Reads only; torch is not imported, and nothing is asked of the processes. Exit codes: 0 a diagnosis
was printed, 1 the rank named by --stacks has left none, 2 the directory is no run.
"""

import argparse
import json
import os
import socket
import sys
import time
from pathlib import Path

from common.errors import ConfigError
from common.files import names_in
from common.output import run_command
from common.text import columns, rank_ranges
from launch.diagnose.desync import PostMortem, alike, collective_text, named, verdict, where
from training.run.directory import RunDir, read_object
from training.run.waiting import current

MAX_ROWS, MAX_LOGS = 30, 64
RECORD = {"rank", "host", "pid", "time", "request"}
RECORD |= {"step", "phase", "threads", "collectives", "groups"}
STALE = 60  # seconds; more than an answer takes, or clocks differ
CRASH = "Fatal Python error: "


def load(path: Path, folder: str = "diagnosis") -> PostMortem:
    """The post-mortem of the latest start in a run directory.

    Raises:
        FileNotFoundError: if there is no run in it.
        ConfigError: if it cannot be read.
    """
    run = RunDir(path)
    names_in(path)
    if not any(p.exists() for p in (run.status_json, run.run_json, run.config_toml, run.lock_file)):
        raise FileNotFoundError
    starts = (read_object(run.run_json) or {}).get("starts") or [{}]
    records, broken = {}, []
    for file in sorted((path / folder).glob("rank-*.json")):
        record = read_object(file)
        if record and record.keys() >= RECORD:
            records[record["rank"]] = record
        else:
            broken.append(file.name)
    beats = read_object(path / folder / "beats.json") or {}
    # Ranks that did not answer the last request may still have the files of an earlier one.
    newest = max((record["time"] for record in records.values()), default=0.0)
    asked = beats.get("request", 0)
    records = {
        rank: record
        for rank, record in records.items()
        if record["request"] >= asked and record["time"] >= newest - STALE
    }
    start = starts[-1] if isinstance(starts[-1], dict) else {}
    size = start.get("world_size") or max([0, *records]) + 1
    post_mortem = PostMortem(
        records, beats.get("beats", []), size, start.get("hosts") or {}, broken
    )
    # A crash of the interpreter leaves its stacks in the log alone.
    for rank in post_mortem.silent[:MAX_LOGS]:
        if crash := _crash(run.log_file(rank)):
            post_mortem.crashes[rank] = crash
    return post_mortem


def _crash(log: Path) -> str | None:
    """What faulthandler has written into a rank's log since its last start; None if nothing."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, os.path.getsize(log) - 2**18))
            text = file.read().decode(errors="replace")
    except OSError:
        return None
    text = text.rpartition(" INFO started on ")[2]
    return text[text.index(CRASH) :] if CRASH in text else None


def _clock(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def headline(path: Path, post_mortem: PostMortem) -> list[str]:
    """How the run stands by its status.json, and what that means without a post-mortem."""
    status = RunDir(path).read_status()
    if beginning := _beginning(path, status):
        return [beginning]
    if status is None:
        return ["There is no status.json: no start has got as far as its first step."]
    at, state = _clock(status.get("time", 0)), status.get("state")
    if state == "failed":
        step = "" if status.get("step") is None else f" in step {status['step']}"
        return [f"Failed on {at}, rank {status.get('rank')}{step}: {status.get('error')}"]
    if state != "running":
        why = f" ({status['reason']})" if status.get("reason") else ""
        lines = [f"It has {state} at step {status.get('step')} on {at}{why}: nothing is wrong."]
        return lines + (
            ["What follows was left earlier, on request."] if post_mortem.records else []
        )
    host, pid = status.get("host"), status.get("pid", 0)
    lines = [f"status.json says running since {at}, rank 0 being process {pid} on {host}."]
    if fault := status.get("checkpoint_fault"):
        lines.append(f"Its checkpoints fail: {fault}")
    lines.append(_last_logged(path))
    alive = _alive(pid) if host == socket.gethostname() else None
    if post_mortem.records:
        lines.append(
            "Asked by a signal, ranks write up to two seconds apart: of a run that moves, no two "
            "are at one place. Ask twice: what hangs is where it was."
        )
    if alive:
        lines.append(
            f"That process lives. `kill -USR2 {pid}` there makes every rank write a post-mortem "
            "within about five seconds, without ending; then run this again."
        )
    elif alive is None:
        lines.append(
            f"If it lives, `kill -USR2 {pid}` on {host} makes every rank write a post-mortem, "
            "without ending. If it does not, it was killed or its node went down."
        )
    else:
        lines.append(
            "That process is gone without a word: it was killed (by the scheduler, a person, or "
            "the kernel for memory: `dmesg -T | grep -i 'killed process'`), or its node went down. "
            "The same command goes on from the last checkpoint."
        )
    return lines


def _beginning(path: Path, status: dict | None) -> str | None:
    """A sentence about a start that has locked the directory but not begun to train."""
    lock = RunDir(path).lock_file
    try:
        host, pid = lock.read_text().split()
        taken = lock.stat().st_mtime
    except (OSError, ValueError):
        return None
    if (status and status.get("time", 0) > taken) or not pid.isdecimal():
        return None
    if host == socket.gethostname() and not _alive(int(pid)):
        return None
    return (
        f"Process {pid} on {host} has taken the directory on {_clock(taken)} and has not begun to "
        "train: it reads, tokenises, loads a checkpoint, or waits for a rank that does not come. "
        f"`py-spy dump --pid {pid}` there says which."
    )


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def _last_logged(path: Path) -> str:
    metrics = RunDir(path).metrics_jsonl
    try:
        with metrics.open("rb") as file:
            file.seek(max(0, os.path.getsize(metrics) - 4096))
            lines = file.read().splitlines()
        step = json.loads(lines[-1])["step"]
        return f"The last logged step is {step}, {_clock(metrics.stat().st_mtime)}."
    except (OSError, ValueError, KeyError, IndexError):
        return "No step is logged."


def causes(post_mortem: PostMortem) -> list[str]:
    """Who raised, crashed or is silent."""
    lines = []
    raised, crashes, beats = post_mortem.raised, post_mortem.crashes, post_mortem.silent_beats()
    for (text, place), ranks in alike(raised, lambda r: (raised[r]["error"], where(raised[r]))):
        lines.append(f"{named(ranks, capital=True)} raised {text} (at {place}).")
    for (error, place), ranks in alike(crashes, lambda rank: _crash_place(crashes[rank])):
        lines.append(f"{named(ranks, capital=True)} crashed: {error} (at {place}).")
    for (host, step, phase), ranks in alike(beats, beats.get) if post_mortem.records else []:
        last = "never heard of" if step is None else f"last heard in step {step}, {phase}"
        verb = "has" if len(ranks) == 1 else "have"
        lines.append(
            f"{named(ranks, capital=True)} on {host} {verb} left nothing (stopped, killed or cut "
            f"off): {last}."
        )
    if post_mortem.broken:
        lines.append(f"Cannot be read: {', '.join(post_mortem.broken[:5])}.")
    return lines


def _crash_place(text: str) -> tuple[str, str]:
    """The error and the innermost frame of what faulthandler has written."""
    frames = text.partition("Current thread")[2].splitlines()
    places = (line.strip() for line in frames if line.startswith("  File "))
    return text.splitlines()[0].removeprefix(CRASH), next(places, "an unknown place")


def table(post_mortem: PostMortem) -> list[str]:
    """A line for all ranks that were at the same place."""

    def row(record: dict) -> tuple[str, ...]:
        collective = collective_text(record, current(record))
        return str(record["step"]), record["phase"], collective, where(record)

    rows = [("rank", "host", "step", "phase", "last collective", "our code")]
    for cells, ranks in alike(post_mortem.records, lambda rank: row(post_mortem.records[rank])):
        hosts = sorted({post_mortem.records[rank]["host"] for rank in ranks})
        host = hosts[0] if len(hosts) == 1 else f"{hosts[0]} and {len(hosts) - 1} more"
        rows.append((rank_ranges(ranks), host, *cells))
    beats = post_mortem.silent_beats()
    for (host, step, phase), ranks in alike(beats, beats.get):
        rows.append((rank_ranges(ranks), host, str(step), phase, "left nothing", ""))
    more = len(rows) - 1 - MAX_ROWS
    lines = columns(rows[: MAX_ROWS + 1])
    return lines + ([f"... and {more} more"] if more > 0 else [])


def stacks(post_mortem: PostMortem, rank: int) -> str | None:
    """The stacks that a rank has written, the innermost call last; None if it has written none."""
    record = post_mortem.records.get(rank)
    if record is None:
        return post_mortem.crashes.get(rank)
    lines = [f"rank {rank}, process {record['pid']} on {record['host']}, {_clock(record['time'])}"]
    for thread in record["threads"]:
        lines += ["", f"{thread['name']}:", *(f"  {frame}" for frame in thread["frames"][::-1])]
    if "traceback" in record:
        lines += ["", record["traceback"].rstrip()]
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Print the diagnosis of a run directory; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m launch.diagnose",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run_dir", type=Path, help="the run directory (--run-dir of the training)")
    parser.add_argument("--stacks", type=int, metavar="RANK", help="print the stacks of one rank")
    previous_help = "diagnose the start before the latest one"
    parser.add_argument("--previous", action="store_true", help=previous_help)
    options = parser.parse_args(argv)
    path = options.run_dir
    try:
        post_mortem = load(path, "diagnosis.previous" if options.previous else "diagnosis")
    except ConfigError as error:
        print(f"diagnose: error: {error}", file=sys.stderr)
        return 2
    except FileNotFoundError:
        missing = "it has no status.json, run.json or config.toml"
        print(f"{path} is no run directory: {missing}", file=sys.stderr)
        return 2
    if options.stacks is not None:
        text = stacks(post_mortem, options.stacks)
        print(text or f"rank {options.stacks} has left no stacks in {path}")
        return 0 if text else 1
    lines = [] if options.previous else headline(path, post_mortem)
    lines += causes(post_mortem) + verdict(post_mortem)
    if post_mortem.records:
        times = [record["time"] for record in post_mortem.records.values()]
        lines += [
            "",
            f"As of {_clock(max(times))}:",
            *table(post_mortem),
            "",
            f"Stacks: python -m launch.diagnose {path} --stacks RANK",
        ]
    elif options.previous or (RunDir(path).read_status() or {}).get("state") == "failed":
        lines.append(f"No rank has left a diagnosis. Their logs: {RunDir(path).log_file(0).parent}")
    print("\n".join(lines))
    return 0


if __name__ == "__main__":
    run_command(main, "launch.diagnose")
