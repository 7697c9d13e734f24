"""How fast a step is on each layout, where its time goes, and how that compares with others.

    python -m benchmarks.step_time --layouts 1x1 4x1 2x2 1x4 --against transformers

CPU, float32, the same tokens in every step. Each measurement runs in processes of its own, all of
them in turn, several times. Tokens per CPU second (of all ranks and threads together) say how much
work a token is; on a machine with fewer cores than processes, wall time says little. Memory is the
largest sum of the bytes of all tensors that a rank holds at a time, from building the model on.
Flags of train_llm.py change the model and the options of our own trainer. ``--against accelerate``
needs ``pip install accelerate``.
"""

import functools
import gc
import math
import os
import statistics
import sys
import weakref

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.ranks import Training, cpu_and_wall, over_ranks, run_ranks, write_json
from parallel.launch import Launch
from parallel.layout import layout_flags, parse_layout
from training.config.command_line import Parser, parse_flags
from training.config.schema import Config

MODEL = """
    --hidden-size 256 --intermediate-size 704 --num-hidden-layers 4 --num-attention-heads 8
    --num-key-value-heads 8 --vocab-size 512 --seq-len 256 --micro-batch-size 4
""".split()  # noqa: SIM905
REDUCTION = ("FSDP::post_backward_reduce", "FSDP::root_post_backward_callback")


class PeakTensorBytes(TorchDispatchMode):
    """The largest sum of bytes of the tensors that were made under it, in ``peak``."""

    def __init__(self):
        super().__init__()
        self.peak, self._alive = 0, {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # comes again, for each part of what it does
        out = func(*args, **(kwargs or {}))
        for t in torch.utils._pytree.tree_leaves(out):
            if type(t) is torch.Tensor and t.device.type == "cpu":
                storage = t.untyped_storage()
                if storage._cdata not in self._alive:
                    self._alive[storage._cdata] = weakref.ref(storage)
                    weakref.finalize(storage, self._alive.pop, storage._cdata, None)
        # Not added up as they come: FSDP2 resizes storages.
        found = (storage() for storage in list(self._alive.values()))
        self.peak = max(self.peak, sum(s.nbytes() for s in found if s is not None))
        return out


class Transformers:
    """The plain recipe: transformers' Llama, ``parallelize_module``, ``fully_shard``, AdamW.

    Args:
        sequence_parallel: as PyTorch's tensor-parallel tutorial does it, with the loss on logits
            that stay cut; else activations are replicated between the regions.
    """

    def __init__(self, launch: Launch, flags: list[str], sequence_parallel: bool):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
        from transformers import LlamaForCausalLM

        config = parse_flags(flags, console=False)
        tp = config.layout.tp
        dp = launch.world_size // tp
        torch.distributed.init_process_group("gloo", rank=launch.rank, world_size=launch.world_size)
        mesh = init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))
        torch.manual_seed(0)
        self.model = LlamaForCausalLM(_llama_config(config))
        self._cut_loss = sequence_parallel and tp > 1
        if tp > 1:
            _parallelize(self.model, mesh["tp"], sequence_parallel)
        for layer in self.model.model.layers:
            fully_shard(layer, mesh=mesh["dp"])
        fully_shard(self.model, mesh=mesh["dp"])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        shape = (config.step.micro_batch_size, config.step.seq_len)
        self._tokens = torch.randint(0, config.model.vocab_size, shape)
        self.tokens_per_step = math.prod(shape) * dp

    def step(self) -> None:
        """One optimizer step, with a global gradient norm and clipping."""
        from torch.distributed.tensor.parallel import loss_parallel

        with loss_parallel() if self._cut_loss else torch.no_grad() as _, torch.enable_grad():
            with record_function("forward"):
                logits = self.model(input_ids=self._tokens).logits
                loss = F.cross_entropy(logits.flatten(0, 1), self._tokens.flatten())
            with record_function("backward"):
                loss.backward()
        with record_function("gradient norm"):
            self._clip()
        with record_function("update"):
            self.optimizer.step()
            self.optimizer.zero_grad()

    def _clip(self) -> None:
        # Weights that are not on the tp mesh cannot be in one norm with those that are.
        groups = {}
        for p in self.model.parameters():
            groups.setdefault(p.device_mesh, []).append(p)
        norms = []
        for parameters in groups.values():
            norm = torch.nn.utils.get_total_norm([p.grad for p in parameters])
            norms.append(norm.full_tensor())
        total = torch.linalg.vector_norm(torch.stack(norms))
        for parameters in groups.values():
            torch.nn.utils.clip_grads_with_norm_(parameters, 1.0, total)


def _parallelize(model, mesh, sequence_parallel: bool) -> None:
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    stream = Shard(1) if sequence_parallel else Replicate()
    block = {
        "self_attn.q_proj": ColwiseParallel(),
        "self_attn.k_proj": ColwiseParallel(),
        "self_attn.v_proj": ColwiseParallel(),
        "self_attn.o_proj": RowwiseParallel(output_layouts=stream),
        "mlp.gate_proj": ColwiseParallel(),
        "mlp.up_proj": ColwiseParallel(),
        "mlp.down_proj": RowwiseParallel(output_layouts=stream),
    }
    whole = {
        # Whole also under sequence parallelism: positions and mask are made from its shape.
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
        "lm_head": ColwiseParallel(
            input_layouts=stream,
            output_layouts=Shard(-1) if sequence_parallel else Replicate(),
            use_local_output=not sequence_parallel,
        ),
    }
    if sequence_parallel:
        enter = {"desired_input_layouts": (Replicate(),)}
        block |= {
            "input_layernorm": SequenceParallel(),
            "post_attention_layernorm": SequenceParallel(),
            "self_attn": PrepareModuleInput(
                input_kwarg_layouts={"hidden_states": Shard(1)},
                desired_input_kwarg_layouts={"hidden_states": Replicate()},
            ),
            "mlp": PrepareModuleInput(input_layouts=(Shard(1),), **enter),
        }
        whole["model.norm"] = SequenceParallel()
        whole["model.layers.0"] = PrepareModuleInput(
            input_layouts=(Replicate(),), desired_input_layouts=(Shard(1),), use_local_output=True
        )
    parallelize_module(model, mesh, whole)
    for layer in model.model.layers:
        parallelize_module(layer, mesh, block)


class Accelerate:
    """transformers' Llama, prepared by ``accelerate``: on a CPU it knows data parallelism alone.

    Raises:
        ValueError: if ``accelerate`` refuses the layout.
    """

    def __init__(self, launch: Launch, flags: list[str]):
        from accelerate import Accelerator
        from accelerate.parallelism_config import ParallelismConfig
        from transformers import LlamaForCausalLM

        config = parse_flags(flags, console=False)
        tp, dp = config.layout.tp, launch.world_size // config.layout.tp
        os.environ |= {"WORLD_SIZE": str(launch.world_size), "LOCAL_RANK": str(launch.rank)}
        sizes = {"parallelism_config": ParallelismConfig(dp_shard_size=dp, tp_size=tp)}
        self._accelerator = Accelerator(cpu=True, **(sizes if tp > 1 else {}))
        torch.manual_seed(0)
        model = LlamaForCausalLM(_llama_config(config))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        self.model, self.optimizer = self._accelerator.prepare(model, optimizer)
        shape = (config.step.micro_batch_size, config.step.seq_len)
        self._tokens = torch.randint(0, config.model.vocab_size, shape)
        self.tokens_per_step = math.prod(shape) * dp

    def step(self) -> None:
        """One optimizer step, with clipping."""
        with record_function("forward"):
            logits = self.model(input_ids=self._tokens).logits
            loss = F.cross_entropy(logits.flatten(0, 1), self._tokens.flatten())
        with record_function("backward"):
            self._accelerator.backward(loss)
        with record_function("gradient norm"):
            self._accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
        with record_function("update"):
            self.optimizer.step()
            self.optimizer.zero_grad()


def _llama_config(config: Config):
    from transformers import LlamaConfig

    model = config.model
    return LlamaConfig(
        hidden_size=model.hidden_size,
        intermediate_size=model.intermediate_size,
        num_hidden_layers=model.num_hidden_layers,
        num_attention_heads=model.num_attention_heads,
        num_key_value_heads=model.kv_heads,
        vocab_size=model.vocab_size,
        max_position_embeddings=config.step.seq_len,
        use_cache=False,
    )


PEERS = {
    "ours": Training,
    "transformers": functools.partial(Transformers, sequence_parallel=False),
    "accelerate": Accelerate,
    "transformers, sequence parallel": functools.partial(Transformers, sequence_parallel=True),
}


def measure(launch: Launch, peer: str, flags: list[str], steps: int) -> dict:
    """One trainer on this rank; the sums over ranks, or its ``refusal``."""
    memory = PeakTensorBytes()
    with memory:
        try:
            trainer = PEERS[peer](launch, flags)
        except ValueError as error:
            return {"refusal": str(error)}
        trainer.step()  # the first makes the optimizer's state
        gc.collect()
        memory.peak = 0
        trainer.step()
    trainer.step()
    cpu, wall = cpu_and_wall(trainer.step, steps)
    parts = split(trainer.step)
    cpus, walls, peaks, *each = over_ranks(cpu, wall, memory.peak, *parts.values())
    return {
        "tokens_per_cpu_s": trainer.tokens_per_step / sum(cpus),
        "tokens_per_s": trainer.tokens_per_step / max(walls),
        "peak_bytes": max(peaks),
        "split": dict(zip(parts, (statistics.mean(x) for x in each), strict=True)),
    }


def split(step) -> dict[str, float]:
    """Seconds of one profiled step in its parts; profiling itself makes all of them longer.

    FSDP2 reduces gradients while the backward goes on; ``reduction`` is what the backward spends on
    packing, starting and waiting for that, and is not counted as ``backward``.
    """
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        step()
    found = {event.key: event.cpu_time_total / 1e6 for event in profiler.key_averages()}
    # The name of the module follows.
    reduction = sum(seconds for key, seconds in found.items() if key.startswith(REDUCTION))
    return {
        "forward": found.get("forward", 0.0),
        "backward": found.get("backward", 0.0) - reduction,
        "reduction": reduction,
        "norm and clip": found.get("gradient norm", 0.0),
        "update": found.get("update", 0.0),
    }


def flags_of(name: str, train_flags: list[str]) -> list[str]:
    """Flags of one layout, with as many sequences per data-parallel rank as in any other."""
    flags = [*MODEL, *train_flags]
    sizes = parse_layout(name)
    batch = parse_flags(flags, console=False).step.micro_batch_size
    total = batch * sizes["dp"] * sizes["dp_replicate"] * (4 if sizes["pp"] > 1 else 1)
    return [*flags, *layout_flags(name), "--global-batch-size", str(total)]


def report(found: dict[tuple[str, str], list[dict]]) -> list[dict]:
    """Print a line for each trainer and layout; the records behind it."""
    records, lines = [], []
    for (name, peer), rounds in found.items():
        speeds = [r["tokens_per_cpu_s"] for r in rounds]
        record = {
            "layout": name,
            "trainer": peer,
            "tokens_per_cpu_s": statistics.median(speeds),
            "tokens_per_cpu_s_of_rounds": speeds,
            "spread": (max(speeds) - min(speeds)) / statistics.median(speeds),
            "tokens_per_s": statistics.median(r["tokens_per_s"] for r in rounds),
            "peak_bytes": statistics.median(r["peak_bytes"] for r in rounds),
            "split": {
                part: statistics.median(r["split"][part] for r in rounds)
                for part in rounds[0]["split"]
            },
        }
        records.append(record)
    for record in records:
        ours = next(
            r for r in records if r["layout"] == record["layout"] and r["trainer"] == "ours"
        )
        whole = sum(record["split"].values())
        faster = ours["tokens_per_cpu_s"] / record["tokens_per_cpu_s"]
        lines.append(
            [
                record["layout"],
                record["trainer"],
                f"{record['tokens_per_cpu_s']:,.0f}",
                f"{record['spread']:.0%}",
                f"{faster:.2f}",
                f"{record['peak_bytes'] / 2**20:.0f}",
                f"{ours['peak_bytes'] / record['peak_bytes']:.2f}",
                *(f"{seconds / whole:.0%}" for seconds in record["split"].values()),
            ]
        )
    head = [
        "layout",
        "trainer",
        "tokens per CPU s",
        "spread",
        "ours is times",
        "peak MiB of tensors",
    ]
    head += ["ours is times", *records[0]["split"]]
    print("| " + " | ".join(head) + " |\n" + "|---" * len(head) + "|")
    for line in lines:
        print("| " + " | ".join(line) + " |")
    return records


def main() -> int:
    """Measure everything in turn, print the table, write JSON."""
    parser = Parser(prog="python -m benchmarks.step_time", description=__doc__)
    add = parser.add_argument
    usual = ["1x1", "1x8", "2x4", "4x2", "8x1", "pp2-dp2-tp2", "dp2-cp2-tp2"]
    add("--layouts", nargs="+", default=usual, metavar="LAYOUT")
    add("--against", choices=("transformers", "accelerate"), help="measure this, too")
    add("--rounds", type=int, default=5)
    add("--steps", type=int, default=6, help="measured in each round, after 3 others")
    options, train_flags = parser.parse_known_args()
    peers = [peer for peer in PEERS if peer.startswith(options.against or "ours") or peer == "ours"]
    found = {}
    for number in range(options.rounds):
        for name in options.layouts:
            sizes = parse_layout(name)
            for peer in peers:
                if peer != "ours" and sizes["dp"] * sizes["tp"] != math.prod(sizes.values()):
                    continue  # they know no other dims
                if "sequence" in peer and sizes["tp"] == 1:
                    continue
                print(f"round {number + 1} of {options.rounds}: {name}, {peer}", file=sys.stderr)
                flags = flags_of(name, train_flags)
                processes = math.prod(sizes.values())
                result = run_ranks(measure, processes, peer, flags, options.steps)
                if "refusal" in result:
                    print(f"{peer} refuses {name}: {result['refusal']}", file=sys.stderr)
                    continue
                found.setdefault((name, peer), []).append(result)
    records = report(found)
    write_json("step_time", records)
    return 0


if __name__ == "__main__":
    sys.exit(main())
