"""Random bad input: command lines, recipes, checkpoints and Hugging Face directories.

    python -m tests.fuzz --seed 0

Every case is one start of a command in a sandbox of its own. It must end within 60 seconds, with
exit code 0, or with 1 or 2 and one line that says why: no traceback, no file touched but in the
run directory and the cache, no checkpoint lost. What goes on from a damaged run must end as the
run that nobody touched, bit for bit, and what is exported from one must be its weights.
"""

import argparse
import ctypes
import hashlib
import itertools
import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from tests.damage import damage
from tests.runs import SMALL, checkpoint_tensors, forked
from training.config.schema import Config

LIMIT_S = 60.0
LINUX_CAPABILITY_VERSION_3, CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH = 0x20080522, 1, 2
STEPS, LONGER = 2, 3
RUN = ["--comm-timeout", "20", "--stop-after", "4s", "--checkpoint-every", "1"]
RUN += ["--keep-checkpoints", "0", "--log-every", "1"]

WHOLE = [
    -1,
    0,
    1,
    2,
    3,
    5,
    8,
    2**31,
    2**53 + 1,
    2**63,
    2**64 + 1,
    10**30,
    "1e3",
    "0x10",
    "1_0",
    "٣",
]
REAL = ["nan", "inf", "-inf", -1, 0, 0.5, 1, 1e-300, 1e-9, 1e300, "1e400", "1,5", "+.e1"]
TEXT = [
    "",
    " ",
    "none",
    "~",
    "~nobody/x",
    "..",
    "../x",
    "a" * 300,
    "a/" * 3000,
    "x\x1b[31my",
    "a\nb",
]
TEXT += ["\udc80", "https://user:pa55word@host/x", "{}", "[1]", '{"a":' * 3000, "/dev/zero", "fifo"]
TEXT += [
    "folder",
    "missing.jsonl",
    "missing.toml",
    "hf",
    "run",
    "run/config.toml",
    "loop",
    "dangling",
]
TEXT += ["true", "null", "1-2", "1d", "0s", "99999999999d", "synthetic", "bytes", "imagefolder"]
# Each is right, and takes minutes.
SLOW = {"--compile"}
ENVIRON = {
    "RANK": ["0", "1", "x", "-1"],
    "WORLD_SIZE": ["1", "2", "x", "0"],
    "LOCAL_RANK": ["0", "1", "x"],
    "MASTER_ADDR": ["127.0.0.1", "", "no such host"],
    "MASTER_PORT": ["29511", "xx", "0", "99999", "-1"],
    "SLURM_NTASKS": ["4", "x"],
    "SLURM_RESTART_COUNT": ["1", "x", ""],
    "SLURM_STEP_NUM_TASKS": ["1", "x"],
    "TORCHELASTIC_RESTART_COUNT": ["1", "x", ""],
    "PARALLEL_RECIPES_CACHE": ["/dev/null", "", "fifo", "loop", "a" * 300],
    "HOME": ["", "/nonexistent", "fifo"],
    "WANDB_MODE": ["disabled", "x", "offline"],
    "WANDB_PROJECT": ["", "a/b", "x" * 300],
    "NETRC": ["fifo", "folder"],
    "OMP_NUM_THREADS": ["1", "x"],
}
FLAGS = [
    "--" + name.replace("_", "-")
    for section in Config.model_fields.values()
    for name in getattr(section.annotation, "model_fields", {})
] + ["--recipe", "--model-config", "--init-from"]


@dataclass
class Case:
    """One start: what is run, and what was there before it.

    Attributes:
        program: train_llm.py, or a module.
        argv: its arguments.
        what: the input that was made bad, for a person.
        files: content hashes of the checkpoints, all of which must still be there at the end.
    """

    folder: Path
    program: str = "train_llm.py"
    argv: list[str] = field(default_factory=list)
    environ: dict[str, str] = field(default_factory=dict)
    what: str = ""
    files: set[str] = field(default_factory=set)


def make_base(base: Path) -> None:
    """Train the run that cases damage, the one that it must become, and its export."""
    environ = {"PARALLEL_RECIPES_CACHE": str(base / "cache")}
    for name, steps in (("run", STEPS), ("straight", LONGER)):
        argv = [
            *SMALL,
            *RUN,
            "--steps",
            steps,
            "--lr-decay-steps",
            LONGER,
            "--run-dir",
            base / name,
        ]
        code, out, err = forked(*argv, environ=environ)
        assert code == 0, out + err
    code, out, err = forked(base / "run", base / "hf", program="recipes.export_hf", environ=environ)
    assert code == 0, out + err


def _hashes(folder: Path) -> set[str]:
    files = (path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    return {hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def _listing(folder: Path, apart: set[str]) -> dict[str, tuple]:
    """Every file of a sandbox but those at its top whose names are in ``apart``."""
    listed = {}
    for path in folder.rglob("*"):
        name = path.relative_to(folder)
        if name.parts[0] not in apart and not path.is_dir():
            status = path.lstat()
            listed[str(name)] = status.st_mode, status.st_size, status.st_mtime_ns
    return listed


def sandbox(base: Path, folder: Path) -> None:
    """A folder to start in: copies of the run and of its export, and odd files."""
    for name in ("run", "hf"):
        shutil.copytree(base / name, folder / name)
    for name in ("home", "tmp", "folder"):
        (folder / name).mkdir()
    os.mkfifo(folder / "fifo")
    (folder / "loop").symlink_to("loop")
    (folder / "dangling").symlink_to("nowhere")


def command_case(case: Case, chance: random.Random) -> None:
    """Flags with values of any kind, an odd environment, words that are no flags."""
    words = []
    for _ in range(chance.randint(1, 3)):
        flag = chance.choice(sorted(set(FLAGS) - SLOW))
        value = chance.choice(chance.choice([WHOLE, REAL, TEXT]))
        style = chance.random()
        if style < 0.75:
            words += [flag, value]
        elif style < 0.9:
            words.append(f"{flag.replace('-', '_').replace('__', '--')}={value}")
        else:
            words.append(chance.choice([f"--no-{flag[2:]}", flag, flag[:-1], value, "--", "-x"]))
    if chance.random() < 0.3:
        for name in chance.sample(sorted(ENVIRON), chance.randint(1, 3)):
            case.environ[name] = chance.choice(ENVIRON[name])
    run_dir = ["--run-dir", chance.choice(["new", "run"])]
    case.argv = [*SMALL, *RUN, "--steps", STEPS, *run_dir, *words]
    case.what = f"{words} {case.environ or ''}"


def recipe_case(case: Case, chance: random.Random) -> None:
    """A recipe with other types, unknown or repeated keys, or other bytes."""
    lines = (case.folder / "run" / "config.toml").read_text().splitlines()
    values = ['"128"', "true", "1.0", "-1", "nan", "[1]", "{a = 1}", "1979-05-27", '"yes"', "1e400"]
    values += ["2" * 5000, "[" * 5000, '"\\u001b[31m"', "", "0x10", "07"]
    for _ in range(chance.randint(1, 2)):
        at = chance.randrange(len(lines))
        key = lines[at].partition("=")[0].strip()
        lines[at] = chance.choice(
            [
                f"{key} = {chance.choice(values)}",
                f"{lines[at]}\n{lines[at]}",
                f"{key[:-1]} = 1",
                chance.choice(lines),
                "[no_such_table]",
                "[model.rope_scaling]",
                chance.choice(["\0", "\ufeff", "=", "[[model]]", "a.b.c = 1"]),
            ]
        )
    data = "\n".join(lines).encode()
    if chance.random() < 0.2:
        data = chance.choice([data.decode().encode("utf-16"), data[: len(data) // 2], b"\xff", b""])
    (case.folder / "recipe.toml").write_bytes(data)
    case.argv = ["--recipe", "recipe.toml", "--run-dir", "new", "--wandb", "disabled", *RUN]
    case.what = "recipe.toml"


def damage_case(case: Case, chance: random.Random) -> None:
    """A run, or a Hugging Face directory, in which one thing is not as it was written."""
    hf = chance.random() < 0.35
    place = case.folder / ("hf" if hf else "run")
    inside = sorted(path for path in place.rglob("*") if "wandb" not in path.parts)
    names = [path for path in inside if not path.is_dir() or chance.random() < 0.3]
    case.files = _hashes(case.folder / "run/checkpoints")
    target = chance.choice(names)
    before = (
        _hashes(target) if target.is_dir() else {hashlib.sha256(target.read_bytes()).hexdigest()}
    )
    case.what = f"{target.parent.relative_to(case.folder)}/{damage(target, chance)}"
    # What the case itself destroys, the program cannot keep.
    case.files -= before
    train = [*SMALL, *RUN, "--steps", LONGER, "--lr-decay-steps", LONGER]
    if hf:
        case.argv = [*train, "--run-dir", "new", "--init-from", "hf"]
    elif chance.random() < 0.6:
        case.argv = [*train, "--run-dir", "run"]
    elif chance.random() < 0.6:
        case.program, case.argv = "recipes.export_hf", ["run", "out"]
    else:
        case.program, case.argv = "recipes.generate", ["run", "--max-new-tokens", "2"]


def enter(folder: Path) -> None:
    """Begin a case in its process: in its folder, and bound by the modes of files also as root."""
    os.chdir(folder)
    libc = ctypes.CDLL(None)
    header = (ctypes.c_uint32 * 2)(LINUX_CAPABILITY_VERSION_3, 0)
    sets = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable; twice 32 bits
    libc.capget(header, sets)
    for i in range(3):
        sets[i] &= ~(1 << CAP_DAC_OVERRIDE | 1 << CAP_DAC_READ_SEARCH)
    libc.capset(header, sets)


def complaint(case: Case, base: Path) -> str | None:
    """Run a case; what is wrong with how it ended, or None."""
    apart = {"new", "run", "out", "cache", "wandb"} if case.program == "train_llm.py" else {"out"}
    flags = itertools.pairwise(case.argv)
    apart |= {value.split("/")[0] for flag, value in flags if flag == "--run-dir"}
    before = _listing(case.folder, apart)
    started = time.monotonic()
    environ = {"HOME": str(case.folder / "home"), "TMPDIR": str(case.folder / "tmp")}
    environ |= {"PARALLEL_RECIPES_CACHE": str(base / "cache"), "HF_HUB_OFFLINE": "1"}
    code, out, err = forked(
        *case.argv,
        program=case.program,
        environ=environ | case.environ,
        first=(enter, case.folder),
        limit=LIMIT_S,
    )
    seconds = time.monotonic() - started
    said = [line for line in err.splitlines() if ": error" in line]
    if code is None or code < 0:
        return f"ended by {code} after {seconds:.0f} s: {err[-500:]}"
    if code not in (0, 1, 2):
        return f"exit code {code}: {err[-500:]}"
    if "Traceback" in out + err:
        return f"a traceback: {(out + err)[-1500:]}"
    # Rank 0 speaks for the others.
    if code and len(said) != (case.environ.get("RANK") != "1"):
        return f"exit code {code} with {len(said)} lines of error: {err[-1500:]}"
    if "pa55word" in out + err or "\x1b[31m" in out + err:
        return f"printed what must not be: {(out + err)[-500:]!r}"
    if before != (after := _listing(case.folder, apart)):
        changed = {k for k in before.keys() | after.keys() if before.get(k) != after.get(k)}
        changed = {name for name in changed if not name.startswith(("tmp/", "home/.cache"))}
        if changed:
            return f"touched {sorted(changed)[:5]}"
    if lost := case.files - _hashes(case.folder / "run"):
        return f"{len(lost)} files of checkpoints are lost; {out[-300:]} {err[-300:]}"
    return None if code else wrong_result(case, base, err)


def wrong_result(case: Case, base: Path, err: str) -> str | None:
    """What differs from the undamaged run, where a damaged one was taken as good, or passed over
    without a word; None if nothing does."""
    if not case.files:
        return None
    if case.program == "train_llm.py" and "run" in case.argv:
        name = f"checkpoints/step-{LONGER:08d}"
        here, there = (
            checkpoint_tensors(f / name) for f in (case.folder / "run", base / "straight")
        )
        if here.keys() != there.keys() or not all(torch.equal(here[k], there[k]) for k in there):
            return "the run that goes on is another one"
    newest = case.folder / f"run/checkpoints/step-{STEPS:08d}"
    if case.program == "recipes.export_hf" and newest.is_dir() and "is damaged" not in err:
        files = ("model.safetensors", "config.json")
        if any(
            (case.folder / "out" / f).read_bytes() != (base / "hf" / f).read_bytes() for f in files
        ):
            return "the export is of other weights"
    return None


def fuzz(seed: int, counts: dict[Callable, int], out: Path) -> list[str]:
    """Run the cases of a seed; what went wrong, a line each."""
    base = out / "base"
    base.mkdir(parents=True)
    make_base(base)

    faults = []
    for make, count in counts.items():
        for number in range(count):
            case = Case(out / f"{make.__name__}-{number}")
            case.folder.mkdir()
            sandbox(base, case.folder)
            make(case, random.Random(f"{seed} {case.folder.name}"))
            case.argv = [str(word) for word in case.argv]
            fault = complaint(case, base)
            print(f"{case.folder.name}: {case.what!r:.200}: {fault or 'ok'}", flush=True)
            if fault:
                faults.append(f"{case.folder.name} {case.program} {case.what}: {fault}")
            else:
                shutil.rmtree(case.folder, ignore_errors=True)
    return faults


def main() -> None:
    """The whole of a seed; exit code 1 if a case ended badly."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--commands", type=int, default=300)
    parser.add_argument("--recipes", type=int, default=100)
    parser.add_argument("--damages", type=int, default=100)
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    out = Path(tempfile.mkdtemp(prefix="fuzz-"))
    counts = {
        command_case: options.commands,
        recipe_case: options.recipes,
        damage_case: options.damages,
    }
    faults = fuzz(options.seed, counts, out)
    print(json.dumps(faults, indent=1) if faults else f"all {sum(counts.values())} ended well")
    sys.exit(bool(faults))


if __name__ == "__main__":
    main()
