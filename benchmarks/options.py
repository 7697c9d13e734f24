"""What each layout option and memory saver costs and saves: CPU time and peak memory of a step,
as ratios to the same run without it.

    python -m benchmarks.options

4 processes on the CPU, float32, synthetic tokens; every option in processes of its own, all of them
in turn, twice, and the better of both counts. CPU seconds are summed over the ranks: on a machine
with fewer cores than processes they say what the work is, not how long a step takes. Peak memory is
the largest resident set above the level after the imports, of the rank with most.
"""

import gc
import sys

from benchmarks.ranks import Training, cpu_and_wall, over_ranks, run_ranks, write_json
from parallel.launch import Launch
from training.run.metrics import PeakMemory

# PowerSGD begins with the third step.
PROCESSES, ROUNDS, WARM_UP, STEPS = 4, 2, 2, 3
MODEL = """
    --hidden-size 256 --intermediate-size 1024 --num-hidden-layers 4 --num-attention-heads 16
    --num-key-value-heads 8 --vocab-size 8192 --seq-len 256 --global-batch-size 16
""".split()  # noqa: SIM905
# Of each group the first is what the others are compared with.
GROUPS = {
    "4x1, 2 micro-batches": [
        "--micro-batch-size 2",
        "--micro-batch-size 2 --zero 2",
        "--micro-batch-size 2 --zero 1",
        "--micro-batch-size 2 --zero 0",
        "--micro-batch-size 2 --dp-replicate 2",
        "--micro-batch-size 2 --cp 2",
        "--micro-batch-size 2 --tp 2",
        "--micro-batch-size 2 --activation-checkpoint every-2",
        "--micro-batch-size 2 --activation-checkpoint full",
        "--micro-batch-size 2 --loss-chunks 8",
        "--micro-batch-size 2 --prefetch 2",
        "--micro-batch-size 2 --compile",
        "--micro-batch-size 2 --optimizer-state-dtype bfloat16",
        "--micro-batch-size 2 --zero 0 --grad-compression bf16",
        "--micro-batch-size 2 --zero 0 --grad-compression powersgd",
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


def measure(launch: Launch, flags: list[str]) -> dict:
    """CPU seconds of a step, over all ranks, and the peak bytes of the rank with most."""
    memory = PeakMemory("cpu")
    training = Training(launch, [*MODEL, *flags])
    for _ in range(WARM_UP):
        training.step()
    gc.collect()
    memory.reset()
    cpu, _ = cpu_and_wall(training.step, STEPS)
    cpus, peaks = over_ranks(cpu, memory.peak_bytes() or 0)
    return {"cpu_s": sum(cpus), "peak_bytes": int(max(peaks))}


def main() -> int:
    """Measure everything, print a table for each group, and write it all as JSON."""
    found = {}
    for number in range(ROUNDS):
        for options in GROUPS.values():
            for flags in options:
                print(f"round {number + 1} of {ROUNDS}: {flags}", file=sys.stderr)
                found.setdefault(flags, []).append(run_ranks(measure, PROCESSES, flags.split()))
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
    write_json("options", found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
