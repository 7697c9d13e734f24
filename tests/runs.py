"""Whole runs of train_llm.py on the ranks of a group that has no process group of its own."""

import contextlib
import io
import json
import os
import runpy
import struct
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed.checkpoint as dcp

import train_llm
from tests.ranks import CONTEXT, Group, free_port

REPO = Path(__file__).parent.parent
# A model of a second or two: what is tested here is the run, not the learning.
SMALL = """
    --hidden-size 32 --intermediate-size 64 --num-hidden-layers 2 --num-attention-heads 4
    --num-key-value-heads 2 --seq-len 32 --global-batch-size 8 --dataset synthetic --wandb disabled
    --log-every 1 --eval-every 0 --checkpoint-every 0 --lr 0.01 --warmup-steps 2
""".split()  # noqa: SIM905


def run_main(argv: list[str], port: int) -> tuple[int, str]:
    """Run train_llm.main() in this rank; its exit code and what it printed."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    sys.argv = ["train_llm.py", *argv]
    out, code = io.StringIO(), 0
    # What this rank has from the fork server stays frozen: thawed at the end of one run, all of it
    # would be searched in the next.
    frozen = mock.patch.multiple("gc", freeze=mock.DEFAULT, unfreeze=mock.DEFAULT)
    with contextlib.redirect_stdout(out), frozen:
        try:
            train_llm.main()
        except SystemExit as leaving:
            code = leaving.code or 0
    return code, out.getvalue()


def train(group: Group, run_dir: Path, *flags: str | int) -> str:
    """Train to the end on every rank of ``group``; what rank 0 printed."""
    argv = [*SMALL, "--run-dir", str(run_dir), *map(str, flags)]
    results = group.run(run_main, argv, free_port())
    assert {code for code, _ in results} == {0}
    assert not any(text for _, text in results[1:]), "only rank 0 speaks"
    return results[0][1]


def _alone(program: str, argv: list[str], environ: dict[str, str], folder: Path, first) -> None:
    os.environ.clear()
    os.environ.update(environ)
    for stream, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT), stream)
    first[0](*first[1:])
    sys.argv = [program, *argv]
    if program.endswith(".py"):
        runpy.run_path(str(REPO / program), run_name="__main__")
    else:
        runpy.run_module(program, run_name="__main__", alter_sys=True)


def forked(
    *argv: str | int,
    program: str = "train_llm.py",
    environ: dict[str, str] | None = None,
    first: tuple = (int,),
    limit: float = 90,
) -> tuple[int, str, str]:
    """``python train_llm.py ARGV``, but for the seconds of its imports: forked from the fork
    server. Its exit code, what it printed, and what it said on stderr.

    Args:
        program: a script of the repository, or a module.
        environ: variables besides those of this process.
        first: a function to call in the new process, and its arguments.
        limit: seconds until it is killed.
    """
    with tempfile.TemporaryDirectory() as folder:
        words = program, [*map(str, argv)], os.environ | (environ or {}), Path(folder), first
        process = CONTEXT.Process(target=_alone, args=words, daemon=True)
        process.start()
        process.join(limit)
        process.kill()
        process.join()
        out, err = ((Path(folder) / name).read_text(errors="replace") for name in ("out", "err"))
        return process.exitcode, out, err


def command(*argv: str | int, launcher: list[str] | None = None, **options) -> subprocess.Popen:
    words = launcher or []
    return subprocess.Popen(
        [sys.executable, *words, "train_llm.py", *map(str, argv)],
        cwd=REPO,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def rows(run_dir: Path, name: str = "metrics.jsonl") -> list[dict]:
    """The lines of a JSON Lines file of a run."""
    return [json.loads(line) for line in (run_dir / name).read_text().splitlines()]


def curve(run_dir: Path) -> list[tuple]:
    """What must not depend on restarts: (step, loss, grad_norm, lr, tokens) of every row."""
    return [
        tuple(r[k] for k in ("step", "loss", "grad_norm", "lr", "tokens")) for r in rows(run_dir)
    ]


def checkpoint_tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Every whole tensor of a checkpoint but the RNG states, by name."""
    metadata = dcp.FileSystemReader(checkpoint).read_metadata()
    tensors = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in metadata.state_dict_metadata.items()
        if not name.startswith("rng.")
    }
    dcp.load(tensors, checkpoint_id=checkpoint, no_dist=True)
    return tensors


def wandb_records(path):
    """Records of a .wandb file: LevelDB's log format, whose 7-byte header is wandb's own."""
    from wandb.proto import wandb_internal_pb2

    data = path.read_bytes()
    assert data[:4] == b":W&B"
    position, whole = 7, b""
    while position + 7 <= len(data):
        left = 32768 - position % 32768
        if left < 7:
            position += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, position)
        whole += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            yield wandb_internal_pb2.Record.FromString(whole)
            whole = b""


def read_wandb(run_dir):
    """Ids and metric definitions of every wandb folder of a run directory; the newest's rows."""
    found = SimpleNamespace(ids=[], rows=[], axes=[], config={})
    for path in sorted(run_dir.glob("wandb/*run-*/*.wandb"), key=os.path.getmtime):
        found.rows = []
        for item in wandb_records(path):
            if item.WhichOneof("record_type") == "run":
                found.ids.append(item.run.run_id)
                found.config |= {u.key: json.loads(u.value_json) for u in item.run.config.update}
            elif item.WhichOneof("record_type") == "history":
                cells = item.history.item
                row = {c.key or c.nested_key[0]: json.loads(c.value_json) for c in cells}
                found.rows.append(row)
            elif item.WhichOneof("record_type") == "metric":
                found.axes.append((item.metric.glob_name, item.metric.step_metric))
    return found
