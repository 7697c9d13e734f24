"""What one optimizer step sends on each layout, counted as it is sent, beside the least that its
algorithm needs.

    python -m benchmarks.communication

On the CPU with gloo, float32, ZeRO-3, rank 0. The minimum is worked out here from the shapes of the
model and the papers, apart from the plan of the trainer. Bytes are those of the whole tensor: the
gathered one, the one before a scatter. Besides, each step sums a CPU vector of three int64 (target
tokens, and who asks to stop) over all ranks while the step before it is computed.
"""

import collections
import math
import sys

from benchmarks.ranks import Training, run_ranks, write_json
from parallel.launch import Launch
from parallel.layout import layout_flags, parse_layout
from recipes.plan.measure import CountCollectives
from training.config.command_line import Parser

MODEL = """
    --hidden-size 256 --intermediate-size 704 --num-hidden-layers 4 --num-attention-heads 8
    --num-key-value-heads 8 --vocab-size 512 --seq-len 256 --global-batch-size 32
    --micro-batch-size 4
""".split()  # noqa: SIM905
FLOAT, DOUBLE = 4, 8


def count(launch: Launch, flags: list[str]) -> list:
    """(mesh dim, kind, bytes, count) of a step on this rank."""
    training = Training(launch, flags)
    training.step()
    with CountCollectives() as counter:
        training.step()
    return [(*key, n) for key, n in counter.by_dim(training.ranks.mesh).items()]


def minimum(training_flags: list[str], sizes: dict[str, int]) -> collections.Counter:
    """``[mesh dim, kind]`` to (count, bytes) that a step needs at least, on rank 0.

    Tensor parallel: Megatron-LM (Shoeybi et al. 2019), with sequence parallelism Korthikanti et
    al. 2022, both without gathering an input again for the backward. Loss: a maximum, and a sum of
    two numbers, per token. FSDP: ZeRO-3 (Rajbhandari et al. 2020), which gathers a block twice, but
    what the backward begins with, and the embedding, which it does not read, once.
    """
    from training.config.command_line import parse_flags

    config = parse_flags(training_flags, console=False)
    m, step = config.model, config.step
    tp, pp, cp = sizes["tp"], sizes["pp"], sizes["cp"]
    replicas, shards = sizes["dp_replicate"], sizes["dp"] * cp
    micro = step.global_batch_size // (step.micro_batch_size * sizes["dp"] * replicas)
    tokens, blocks = step.micro_batch_size * step.seq_len // cp, m.num_hidden_layers // pp
    stream, d = tokens * m.hidden_size * FLOAT, m.hidden_size
    cut = config.layout.sequence_parallel == "on"
    first_and_last = pp == 1
    least = collections.Counter()

    def add(dim: str, kind: str, number: int, size: int) -> None:
        least[dim, kind, "count"] += number
        least[dim, kind, "bytes"] += number * size

    if tp > 1:
        ends = 2 * blocks + 1, 2 * blocks + first_and_last  # leave a region, enter one
        crossings = micro * sum(ends)
        if cut:
            add("tp", "all_gather", crossings, stream)
            add("tp", "reduce_scatter", crossings, stream)
            weights = 2 * blocks + first_and_last
            add("tp", "all_reduce", 1, weights * d // shards * FLOAT)
        else:
            add("tp", "all_reduce", crossings, stream)
        if first_and_last:
            add("tp", "all_reduce", micro, tokens * FLOAT)
            add("tp", "all_reduce", micro, 2 * tokens * FLOAT)
    kv = m.kv_heads * m.head_size
    block = (2 * d * m.num_attention_heads * m.head_size + 2 * d * kv) // tp
    block += 3 * d * m.intermediate_size // tp + 2 * d
    table = m.vocab_size // tp * d
    ends = [table, table + d] if first_and_last else [table]
    if cp > 1:
        both = 2 * cp * tokens * kv // tp * FLOAT
        add("cp", "all_gather", micro * blocks, both)
        add("cp", "reduce_scatter", micro * blocks, both)
    data = "dp x cp" if cp > 1 else "dp"
    for unit, gathers in [(block, 2)] * blocks + [(end, 1) for end in ends]:
        if shards > 1:
            add(data, "all_gather", micro * gathers, unit * FLOAT)
            add(data, "reduce_scatter", micro, unit * FLOAT)
        if replicas > 1:
            add("dp_replicate", "all_reduce", 1, unit // shards * FLOAT)
    if pp > 1:
        add("pp", "send", micro, stream // (tp if cut else 1))
        add("pp", "recv", micro, stream // (tp if cut else 1))
    add("all", "all_reduce", 1, 2 * DOUBLE)
    return least


def main() -> int:
    """Count on each layout, print a row per mesh dim and kind, write JSON; 1 if any is above."""
    parser = Parser(prog="python -m benchmarks.communication", description=__doc__)
    parser.add_argument(
        "--layouts",
        nargs="+",
        metavar="DPxTP",
        default=[
            "1x1",
            "1x8",
            "2x4",
            "4x2",
            "8x1",
            "2x2",
            "1x4",
            "4x1",
            "rep2-dp2-tp2",
            "dp2-cp2-tp2",
            "pp2-dp2-tp2",
        ],
    )
    options = parser.parse_args()
    print(
        "| layout | sequence parallel | dim | collective | per step | minimum | bytes | minimum "
        "| ratio |\n|---|---|---|---|---|---|---|---|---|"
    )
    records = []
    for name in options.layouts:
        sizes = parse_layout(name)
        for mode in ("on", "off") if sizes["tp"] > 1 else ("off",):
            flags = [*MODEL, *layout_flags(name), "--sequence-parallel", mode]
            found = collections.Counter()
            for dim, kind, size, n in run_ranks(count, math.prod(sizes.values()), flags):
                found[dim, kind, "count"] += n
                found[dim, kind, "bytes"] += n * size
            least = minimum(flags, sizes)
            for dim, kind in sorted({key[:2] for key in found | least}):
                row = {"layout": name, "sequence_parallel": mode, "dim": dim, "collective": kind}
                for what in ("count", "bytes"):
                    row[what], row[f"minimum_{what}"] = (x[dim, kind, what] for x in (found, least))
                row["ratio"] = row["bytes"] / row["minimum_bytes"] if row["minimum_bytes"] else None
                records.append(row)
                ratio = "above" if row["ratio"] is None else f"{row['ratio']:.2f}"
                print(
                    f"| {name} | {mode} | {dim} | {kind} | {row['count']} | "
                    f"{row['minimum_count']} | {row['bytes']:,} | {row['minimum_bytes']:,} | "
                    f"{ratio} |",
                    flush=True,
                )
    write_json("communication", records)
    return int(any(r["ratio"] != 1 or r["count"] != r["minimum_count"] for r in records))


if __name__ == "__main__":
    sys.exit(main())
