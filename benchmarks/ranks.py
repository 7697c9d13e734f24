"""Forked ranks for the benchmarks, and the trainer of this repository on them."""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from models.decoder import Llama
from models.initialization import init_weights
from parallel import parallelize
from parallel.grad_compression import replicate
from parallel.launch import Launch
from parallel.mesh import init_ranks
from tests.ranks import Group, free_port
from training import setup as start
from training.config.command_line import parse_flags
from training.config.options import planner_options
from training.optimizers.sharded import ShardedOptimizer
from training.start import check
from training.step import Engine, forward_backward, update


def _rank(function: Callable, processes: int, port: int, args: tuple) -> object:
    rank = int(os.environ["RANK"])
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    result = function(Launch(rank, processes, rank, processes), *args)
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    return result


def run_ranks(function: Callable, processes: int, *args) -> dict:
    """``function(launch, *args)`` on forked processes that have measured nothing else.

    Returns:
        What it returned on rank 0, through JSON.
    """
    group = Group(processes, timeout=3600, process_group=False)
    try:
        results = group.run(_rank, function, processes, free_port(), args)
    finally:
        group.close()
    return json.loads(json.dumps(results[0]))


class Training:
    """The trainer of this repository on this rank, without data, files and evaluation.

    Args:
        flags: of train_llm.py.
    """

    def __init__(self, launch: Launch, flags: list[str]):
        self.config = config = parse_flags(flags, console=False)
        self.layout = layout = check(config, launch)
        self.ranks = ranks = init_ranks(launch, layout, 600)
        with torch.device("meta"):
            self.model = model = Llama(config.model)
        options = planner_options(config, ranks.device.type == "cuda")
        stages = layout.rank_stages(config.model, config.step.seq_len, ranks.pp_rank)
        parts = parallelize(model, ranks.mesh, options, zero=layout.zero, stages=stages)
        self.pipeline = start.make_pipeline(config, parts, stages, layout, ranks)
        model.to_empty(device=ranks.device)
        init_weights(model, 0)
        self.optimizer = ShardedOptimizer(model, config.optimizer)
        trained = replicate(model, config.memory.grad_compression)
        self._engine = Engine(trained, self.optimizer, layout, ranks, self.pipeline)
        self._step = 0
        shape = (layout.micro_batch_size, config.step.seq_len // layout.cp)
        tokens = torch.randint(0, config.model.vocab_size, shape, device=ranks.device)
        self._batch = [(tokens, tokens)] * layout.micro_batches
        self.tokens_per_step = config.step.global_batch_size * config.step.seq_len

    def step(self) -> None:
        """One optimizer step."""
        self._step += 1
        share = forward_backward(self._engine, self._batch, self.tokens_per_step)
        update(self._engine, share, step=self._step, lr=1e-4, grad_clip=1.0)


def over_ranks(*values: float) -> list[list[float]]:
    """Each value on every rank: a list of ranks for each."""
    mine = torch.tensor(values, dtype=torch.float64)
    found = [torch.zeros_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(found, mine)
    return torch.stack(found).T.tolist()


def cpu_and_wall(step: Callable[[], None], steps: int) -> tuple[float, float]:
    """CPU seconds of this process (all threads) and wall seconds of one step, averaged."""
    cpu, wall = time.process_time(), time.perf_counter()
    for _ in range(steps):
        step()
    return (time.process_time() - cpu) / steps, (time.perf_counter() - wall) / steps


def write_json(name: str, found: list | dict) -> None:
    """Leave what a benchmark has found in ``runs/benchmarks/<name>.json``."""
    out = Path("runs/benchmarks") / f"{name}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(found, indent=1) + "\n")
