"""What each layout option and memory saver costs and saves: CPU time and peak memory of a step,
as ratios to the same run without it.

    python -m benchmarks.options

4 processes on the CPU, float32, synthetic tokens; every option in processes of its own, all of them
in turn, twice, and the better of both counts. CPU seconds are summed over the ranks: on a machine
with fewer cores than processes they say what the work is, not how long a step takes. Peak memory is
the largest resident set above the level after the imports, of the rank with most.
"""

import gc
import json
import os
import socket
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from models.initialization import init_weights
from models.llama import Llama
from parallel import parallelize
from parallel.grad_compression import replicate
from parallel.layout import Launch
from parallel.mesh import init_ranks
from training import start
from training.checks import check
from training.command_line import parse_flags
from training.loop import FaultFlag, optimizer_step
from training.metrics import PeakMemory
from training.optimizer import ShardedOptimizer

# PowerSGD begins with the third step.
PROCESSES, ROUNDS, WARM_UP, STEPS = 4, 2, 2, 3
MODEL = """
    --hidden-size 256 --intermediate-size 1024 --num-hidden-layers 4 --num-attention-heads 16
    --num-key-value-heads 8 --vocab-size 8192 --seq-len 256 --global-batch-size 16
""".split()  # noqa: SIM905
# Of each group the first is what the others are compared with.
GROUPS = {
    "4x1, 2 micro-batches": [
        "--batch-size 2",
        "--batch-size 2 --zero 2",
        "--batch-size 2 --zero 1",
        "--batch-size 2 --zero 0",
        "--batch-size 2 --dp-replicate 2",
        "--batch-size 2 --cp 2",
        "--batch-size 2 --tp 2",
        "--batch-size 2 --activation-checkpoint selective",
        "--batch-size 2 --activation-checkpoint full",
        "--batch-size 2 --loss-chunks 8",
        "--batch-size 2 --prefetch 2",
        "--batch-size 2 --compile",
        "--batch-size 2 --optimizer-state-dtype bfloat16",
        "--batch-size 2 --zero 0 --grad-compression bf16",
        "--batch-size 2 --zero 0 --grad-compression powersgd",
    ],
    "pp2-dp2-tp1, 4 micro-batches": [
        "--pp 2",
        "--pp 2 --zero 1",
        "--pp 2 --pp-schedule gpipe",
        "--pp 2 --pp-schedule interleaved",
        "--pp 2 --pp-schedule zbv --zero 1",
        "--pp 2 --pp-schedule dualpipev --zero 1",
        "--pp 2 --activation-checkpoint full",
    ],
}


def measure(rank: int, flags: list[str], port: int, out: str) -> None:
    """One option on one rank: writes CPU seconds of a step and the peak bytes to ``out``."""
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    config = parse_flags([*MODEL, *flags], console=False)
    launch = Launch(rank, PROCESSES, rank, PROCESSES)
    layout = check(config, launch)
    ranks = init_ranks(launch, layout, 600)
    memory = PeakMemory("cpu")
    with torch.device("meta"):
        model = Llama(config.model)
    options = start.parallel_options(config, ranks) | config.memory.model_dump()
    stages = layout.rank_stages(config.model, config.step.seq_len, ranks.pp_rank)
    parts = parallelize(model, ranks.mesh, zero=layout.zero, stages=stages, **options)
    pipeline = start.make_pipeline(config, parts, stages, layout, ranks)
    model.to_empty(device="cpu")
    init_weights(model, 0)
    optimizer, fault = ShardedOptimizer(model, config.optimizer), FaultFlag(ranks.device)
    trained = replicate(model, config.memory.grad_compression)
    shape = (layout.batch_size, config.step.seq_len // layout.cp)
    tokens = torch.randint(0, config.model.vocab_size, shape)
    batch = [(tokens, tokens)] * layout.micro_batches
    targets = config.step.global_batch_size * config.step.seq_len

    def step(number: int) -> None:
        optimizer_step(
            trained, optimizer, batch, targets, ranks,
            zero=layout.zero, pipeline=pipeline, lr=1e-4, grad_clip=1.0, step=number, fault=fault,
        )  # fmt: skip

    for number in range(1, WARM_UP + 1):
        step(number)
    gc.collect()
    memory.reset()
    started = time.process_time()
    for number in range(STEPS):
        step(WARM_UP + 1 + number)
    found = torch.tensor([(time.process_time() - started) / STEPS, memory.peak_bytes() or 0])
    totals = [torch.zeros(2) for _ in range(PROCESSES)]
    dist.all_gather(totals, found, group=ranks.control)
    if rank == 0:
        cpu, peak = torch.stack(totals).unbind(dim=1)
        Path(out).write_text(json.dumps({"cpu_s": cpu.sum().item(), "peak_bytes": int(peak.max())}))
    dist.barrier(ranks.control)
    dist.destroy_process_group()


def run(flags: str) -> dict:
    """One option in processes that have measured nothing else."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    with tempfile.NamedTemporaryFile() as out:
        multiprocessing.start_processes(
            measure, (flags.split(), port, out.name), nprocs=PROCESSES, start_method="fork"
        )
        return json.loads(Path(out.name).read_text())


def main() -> int:
    """Measure everything, print a table for each group, and write it all as JSON."""
    found = {}
    for number in range(ROUNDS):
        for options in GROUPS.values():
            for flags in options:
                print(f"round {number + 1} of {ROUNDS}: {flags}", file=sys.stderr)
                found.setdefault(flags, []).append(run(flags))
    best = {
        flags: {key: min(r[key] for r in rounds) for key in rounds[0]}
        for flags, rounds in found.items()
    }
    for name, (base, *others) in GROUPS.items():
        print(f"| {name}: `{base}` and | CPU time | peak memory |\n|---|---|---|")
        for flags in others:
            ratios = [best[flags][key] / best[base][key] for key in ("cpu_s", "peak_bytes")]
            added = flags.replace(f"{base} ", "")
            print(f"| `{added}` | {ratios[0]:.2f} | {ratios[1]:.2f} |")
        print()
    out = Path("runs/benchmarks/options.json")
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
