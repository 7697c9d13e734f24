"""What each ZeRO stage holds: bytes of parameters, gradients and optimizer state per rank, measured
beside the formula; exit code 1 where they differ.

    torchrun --nproc-per-node 4 -m benchmarks.zero_memory

Two micro-batches of the debug recipe's model on the CPU, float32, AdamW.
"""

import json
import math
import sys
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from models.config import LlamaConfig
from models.initialization import init_weights
from models.llama import Llama
from parallel import parallelize
from parallel.data_parallel import fsdp_units
from parallel.layout import Layout, make_layout, read_launch
from parallel.mesh import Ranks, init_ranks, make_mesh
from training.command_line import load_recipe
from training.config import OptimizerSection
from training.loop import forward_backward
from training.optimizer import ShardedOptimizer

FLOAT = 4
WHEN = ("between micro-batches", "at the peak")
WHAT = ("parameters", "gradients", "optimizer")


def formula(config: LlamaConfig, zero: int, n: int) -> dict[str, tuple[int, int, int]]:
    """Bytes of parameters, gradients and optimizer state of one of ``n`` dp ranks, by moment.

    P bytes of parameters, E of the embedding, B of a block and H of norm and head, where n divides
    every matrix:

    - ZeRO-3: P/n each of parameters and gradients; in the backward a block is whole: + B each;
    - ZeRO-2: the backward starts with all gathered that it reads, + P - E, and the gradients of the
      head, + H; where a block is larger, most is held one unit later: + P - E - H and + B;
    - ZeRO-1: within a step P/n + P of parameters and P of gradients;
    - ZeRO-0: the same with n = 1: FSDP2 computes with a copy of a shard that is whole.

    AdamW's state is twice the shards.
    """
    numel = {name: math.prod(shape) for name, shape in config.parameter_shapes.items()}
    p = FLOAT * sum(numel.values())
    block = FLOAT * sum(size for name, size in numel.items() if ".layers.0." in name)
    head = FLOAT * (numel["model.norm.weight"] + numel["lm_head.weight"])
    part = p // (1 if zero == 0 else n)
    read = p - FLOAT * numel["model.embed_tokens.weight"]
    late = max((read, head), (read - head, block), key=sum)
    between, peak = {
        3: ((part, part), (part + block, part + block)),
        2: ((part, part), (part + late[0], part + late[1])),
        1: ((part + p, p), (part + p, p)),
        0: ((part + p, p), (part + p, p)),
    }[zero]
    return {WHEN[0]: (*between, 2 * part), WHEN[1]: (*peak, 2 * part)}


def _bytes(tensor: torch.Tensor) -> int:
    local = getattr(tensor, "_local_tensor", tensor)
    return local.numel() * local.element_size()


def held(model: Llama, optimizer: ShardedOptimizer) -> tuple[int, int, int]:
    """Bytes of parameters, gradients and optimizer state that this rank holds now."""
    parameters = gradients = 0
    groups = (unit._get_fsdp_state()._fsdp_param_group for unit in fsdp_units(model))
    for group in dict.fromkeys(filter(None, groups)):  # norm and head are one
        for p in group.fsdp_params:
            parameters += _bytes(p.sharded_param)
            parameters += sum(t.untyped_storage().nbytes() for t in p.all_gather_outputs)
            whole = getattr(p, "_unsharded_param", None)
            grads = [
                p.sharded_param.grad,
                p.unsharded_accumulated_grad,
                getattr(whole, "grad", None),
            ]
            gradients += sum(_bytes(grad) for grad in grads if grad is not None)
    states = [t for t in optimizer.named_state().values() if t.ndim]
    return parameters, gradients, sum(map(_bytes, states))


class _Watched(list):
    """Micro-batches; calls ``between`` before each but the first."""

    def __init__(self, batches, between):
        super().__init__(batches)
        self._between = between

    def __iter__(self):
        for i, batch in enumerate(super().__iter__()):
            if i:
                self._between()
            yield batch


def measure(config: LlamaConfig, layout: Layout, ranks: Ranks, seq_len: int) -> dict:
    """As :func:`formula`, measured in a forward and backward of two micro-batches."""
    zero = layout.zero
    with torch.device("meta"):
        model = Llama(config)
    parallelize(model, ranks.mesh, sequence_parallel=False, zero=zero, dtype=torch.float32)
    model.to_empty(device=ranks.device)
    init_weights(model, 0)
    optimizer = ShardedOptimizer(model, OptimizerSection())
    found, moments = {}, []
    tokens = torch.randint(0, config.vocab_size, (layout.batch_size, seq_len + 1))
    pair = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    batch = _Watched([pair] * 2, lambda: found.update({WHEN[0]: held(model, optimizer)}))
    real = FSDPParamGroup.post_backward

    def sampled(group, *args, **kwargs):
        # The gradients of a unit are whole, and its parameters still gathered.
        moments.append(held(model, optimizer))
        return real(group, *args, **kwargs)

    with mock.patch.object(FSDPParamGroup, "post_backward", sampled):
        forward_backward(model, batch, 1, ranks, zero)
    return found | {WHEN[1]: max(moments, key=lambda moment: sum(moment[:2]))}


def main() -> int:
    """Print the table, and write it as JSON."""
    launch = read_launch()
    config = load_recipe("debug").model
    config.vocab_size = 256
    ranks, records, table = None, [], []
    for zero in (3, 2, 1, 0):
        layout = make_layout(
            world_size=launch.world_size, tp=1, global_batch_size=2 * launch.world_size,
            batch_size=1, zero=zero,
        )  # fmt: skip
        if ranks is None:
            ranks = init_ranks(launch, layout, 600)
        mesh = make_mesh(ranks.device.type, layout)
        here = Ranks(launch, ranks.device, mesh, ranks.control, ranks.store)
        found, expected = measure(config, layout, here, 64), formula(config, zero, layout.dp)
        for when in WHEN:
            cells = [f"{m:,} / {f:,}" for m, f in zip(found[when], expected[when], strict=True)]
            table.append((f"ZeRO-{zero}", when, *cells))
            records += [
                {"zero": zero, "when": when, "what": what, "measured": m, "formula": f}
                for what, m, f in zip(WHAT, found[when], expected[when], strict=True)
            ]
    if launch.rank == 0:
        rows = [("stage", "moment", *WHAT), *table]
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        print(f"bytes per rank, measured / formula, on {launch.world_size} processes")
        for row in rows:
            print("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip())
        out = Path("runs/benchmarks/zero_memory.json")
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(records, indent=1) + "\n")
    dist.barrier(ranks.control)
    dist.destroy_process_group()
    return int(any(r["measured"] != r["formula"] for r in records))


if __name__ == "__main__":
    sys.exit(main())
