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

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.ranks import Training, run_ranks, write_json
from parallel.layout import Launch, layout_flags, parse_layout
from training.command_line import Parser

MODEL = """
    --hidden-size 256 --intermediate-size 704 --num-hidden-layers 4 --num-attention-heads 8
    --num-key-value-heads 8 --vocab-size 512 --seq-len 256 --global-batch-size 32 --batch-size 4
""".split()  # noqa: SIM905
KINDS = {
    "allgather": "all_gather", "all_gather": "all_gather", "reduce_scatter": "reduce_scatter",
    "allreduce": "all_reduce", "all_reduce": "all_reduce", "send": "send", "recv": "recv",
}  # fmt: skip
FLOAT, DOUBLE = 4, 8


class CountCollectives(TorchDispatchMode):
    """Counts collectives: ``found[group name, kind, bytes of the whole tensor]``."""

    def __init__(self):
        super().__init__()
        self.found = collections.Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        space, _, name = func._schema.name.partition("::")
        if space in ("c10d", "_c10d_functional"):
            kind = next((v for k, v in KINDS.items() if k in name), None)
            if kind:
                leaves = torch.utils._pytree.tree_leaves((args, out))
                tensors = [t for t in leaves if isinstance(t, torch.Tensor)]
                size = max(t.numel() * t.element_size() for t in tensors)
                self.found[_group(func, args), kind, size] += 1
        return out


def _group(func, args: tuple) -> str:
    for value, argument in zip(args, func._schema.arguments, strict=False):
        if argument.name == "group_name":
            return value
        if argument.name == "process_group":
            return dist.ProcessGroup.unbox(value).group_name
    raise ValueError(f"{func} names no group")


def count(launch: Launch, flags: list[str]) -> list:
    """(mesh dim, kind, bytes, count) of a step on this rank."""
    training = Training(launch, flags)
    mesh = training.ranks.mesh
    names = {mesh.get_group(dim).group_name: dim for dim in mesh.mesh_dim_names}
    world = dist.group.WORLD.group_name
    training.step()
    with CountCollectives() as counter:
        training.step()

    def dim(group: str, kind: str, size: int) -> str:
        # A dim over all ranks has no group of its own: what is sent tells the two apart.
        if group == world and (kind, size) == ("all_reduce", 2 * DOUBLE):
            return "all"
        # Only the flattened dim of FSDP is none of the mesh.
        return names.get(group, "dp x cp")

    return [(dim(*key), *key[1:], n) for key, n in counter.found.items()]


def minimum(training_flags: list[str], sizes: dict[str, int]) -> collections.Counter:
    """``[mesh dim, kind]`` to (count, bytes) that a step needs at least, on rank 0.

    Tensor parallel: Megatron-LM (Shoeybi et al. 2019), with sequence parallelism Korthikanti et
    al. 2022, both without gathering an input again for the backward. Loss: a maximum, and a sum of
    two numbers, per token. FSDP: ZeRO-3 (Rajbhandari et al. 2020), which gathers a block twice, but
    what the backward begins with, and the embedding, which it does not read, once.
    """
    from training.command_line import parse_flags

    config = parse_flags(training_flags, console=False)
    m, step = config.model, config.step
    tp, pp, cp = sizes["tp"], sizes["pp"], sizes["cp"]
    replicas, shards = sizes["dp_replicate"], sizes["dp"] * cp
    micro = step.global_batch_size // (step.batch_size * sizes["dp"] * replicas)
    tokens, blocks = step.batch_size * step.seq_len // cp, m.num_hidden_layers // pp
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
    parser.add_argument("--layouts", nargs="+", metavar="DPxTP", default=[
        "1x1", "1x8", "2x4", "4x2", "8x1", "2x2", "1x4", "4x1", "rep2-dp2-tp2", "dp2-cp2-tp2",
        "pp2-dp2-tp2",
    ])  # fmt: skip
    options = parser.parse_args()
    print("| layout | sequence parallel | dim | collective | per step | minimum | bytes | minimum "
          "| ratio |\n|---|---|---|---|---|---|---|---|---|")  # fmt: skip
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
                print(f"| {name} | {mode} | {dim} | {kind} | {row['count']} | "
                      f"{row['minimum_count']} | {row['bytes']:,} | {row['minimum_bytes']:,} | "
                      f"{ratio} |", flush=True)  # fmt: skip
    write_json("communication", records)
    return int(any(r["ratio"] != 1 or r["count"] != r["minimum_count"] for r in records))


if __name__ == "__main__":
    sys.exit(main())
