"""Whole runs of train_llm.py on the ranks of a group that has no process group of its own."""

import contextlib
import io
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

import train_llm
from tests.ranks import Group, free_port

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
    with contextlib.redirect_stdout(out):
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
