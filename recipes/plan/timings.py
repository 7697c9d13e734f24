"""What is timed on a machine for its constants: ``python -m recipes.plan --calibrate``.

All ranks time the same at the same time, as in training; the slowest one's time counts.
"""

import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from models.decoder import Block, Llama
from models.initialization import init_weights
from models.layers import causal_attention, rope_tables
from parallel import parallelize
from parallel.activation_checkpoint import COMPILE_BACKEND, apply_activation_checkpoint
from parallel.layout import Layout
from parallel.mesh import Ranks, sharding_mesh
from planner.machine import Machine
from planner.time import block_seconds
from recipes.plan.fitting import (
    BlockTime,
    Measured,
    Sent,
    Work,
)
from training.config.options import planner_options
from training.config.schema import Config

MIB = 2**20
# Rates no longer grow with tokens above; a training's micro-batch may be far larger.
MOST_TOKENS, LEAST_TOKENS = 16384, 64


class Calibration:
    """The measurements of one training on the ranks of its layout.

    Attributes:
        tokens: sequences and tokens of each that stand for a micro-batch of a rank.
        budget: seconds of a measurement, unless a few repetitions take longer.
    """

    def __init__(self, config: Config, layout: Layout, ranks: Ranks):
        self.config, self.layout, self.ranks = config, layout, ranks
        self.cuda = ranks.device.type == "cuda"
        self.dtype = getattr(torch, config.step.dtype)
        self.budget = 1.0 if self.cuda else 0.15
        model, tp = config.model, layout.tp
        self._local = model.model_copy(
            update={
                "num_attention_heads": model.num_attention_heads // tp,
                "num_key_value_heads": max(1, model.kv_heads // tp),
                "intermediate_size": model.intermediate_size // tp,
                "head_dim": model.head_size,
            }
        )
        self.tokens = self._shape()

    def _shape(self) -> tuple[int, int]:
        """The shape of a micro-batch, shortened where its block would take above a second."""
        side = min(1024, self._local.hidden_size)
        rate = 2 * side**3 / self.seconds(self._products(side, side, side)[0])
        d, head = self._local.hidden_size, self._local.head_size
        heads = 2 * self._local.num_attention_heads + 2 * self._local.kv_heads
        weights = d * (head * heads + 3 * self._local.intermediate_size)
        most = max(LEAST_TOKENS, min(MOST_TOKENS, int(rate / (6 * weights))))
        seq = min(self.config.step.seq_len // self.layout.cp, most)
        return max(1, min(self.layout.micro_batch_size, most // seq)), seq

    def _random(self, *shape: int, grad: bool = False) -> Tensor:
        tensor = torch.randn(shape, device=self.ranks.device, dtype=self.dtype)
        return tensor.requires_grad_(grad)

    def _wait(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def slowest(self, seconds: float) -> float:
        """The largest of the ranks' values."""
        largest = torch.tensor(seconds, dtype=torch.float64)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.ranks.control)
        return largest.item()

    def _batch(self, call: Callable[[], object], calls: int) -> float:
        self._wait()
        started = time.perf_counter()
        for _ in range(calls):
            call()
        self._wait()
        return (time.perf_counter() - started) / calls

    def seconds(self, call: Callable[[], object]) -> float:
        """Of a call: the median of batches of calls, on the slowest rank.

        Batches of some milliseconds, so that a queue runs full, as it does in training; as many of
        them, the same on all ranks, as the time allows.
        """
        self._batch(call, 2)
        one = self.slowest(self._batch(call, 1))
        calls = max(1, int(0.01 / one))
        batches = min(25, max(3, int(self.budget / (one * calls))))
        return self.slowest(statistics.median(self._batch(call, calls) for _ in range(batches)))

    def _products(self, tokens: int, a: int, b: int) -> list[Callable[[], Tensor]]:
        """[tokens, a] x [a, b], and the two products of its backward."""
        x, weight, grad = self._random(tokens, a), self._random(b, a), self._random(tokens, b)
        return [lambda: x @ weight.T, lambda: grad @ weight, lambda: grad.T @ x]

    def products(self) -> list[Work]:
        """Matrix products of the model, each the mean of forward and backward."""
        local, tokens = self._local, self.tokens[0] * self.tokens[1]
        d, f = local.hidden_size, local.intermediate_size
        heads, kv = (n * local.head_size for n in (local.num_attention_heads, local.kv_heads))
        vocabulary = -(-local.vocab_size // self.layout.tp)
        few, chunk = max(1, tokens // 8), max(1, tokens // self.config.memory.loss_chunks)
        shapes = [
            ("query", tokens, d, heads),
            ("key", tokens, d, kv),
            ("feed-forward", tokens, d, f),
            ("query", few, d, heads),
            ("feed-forward", few, d, f),
            ("head", chunk, d, vocabulary),
        ]
        if self.cuda:
            # Clocks fall in the first seconds of full load.
            product, until = self._products(tokens, d, f)[0], time.monotonic() + 3
            while time.monotonic() < until:
                self._batch(product, 10)
        works = []
        for name, n, a, b in shapes:
            three = self._products(n, a, b)
            seconds = self.seconds(lambda three=three: [product() for product in three]) / 3
            works.append(Work(f"{name}: {n} x {a} x {b}", 2 * n * a * b, seconds))
        return works

    def attention(self) -> list[Work]:
        """Forward and backward of attention, at the training's length and half of it."""
        local, (batch, seq), works = self._local, self.tokens, []
        for length in (seq, max(2, seq // 2)):
            q = self._random(batch, local.num_attention_heads, length, local.head_size, grad=True)
            k, v = (
                self._random(batch, local.kv_heads, length, local.head_size, grad=True)
                for _ in range(2)
            )
            grad = torch.ones_like(q)
            seconds = self.seconds(
                lambda q=q, k=k, v=v, grad=grad: torch.autograd.grad(
                    causal_attention(q, k, v), (q, k, v), grad
                )
            )
            flops = 2 * length * q.numel()
            works.append(Work(f"attention: {batch} x {length}", flops, seconds))
        return works

    def memory(self) -> list[Work]:
        """An elementwise operation over more than caches hold."""
        size = (1024 if self.cuda else 64) * MIB
        x = self._random(size // self.dtype.itemsize)
        y = torch.empty_like(x)
        seconds = self.seconds(lambda: torch.mul(x, 2, out=y))
        return [Work(f"elementwise: 2 x {size // MIB} MiB", 2 * size, seconds)]

    def block(self, compiled: bool) -> BlockTime:
        """Forward and backward of a block as wide as a rank has it, without collectives."""
        batch, seq = self.tokens
        with self.ranks.device:
            block = Block(self._local).to(self.dtype)
        if compiled:
            block.run = torch.compile(block.layer, backend=COMPILE_BACKEND, fullgraph=True)
        wide = torch.promote_types(self.dtype, torch.float32)
        tables = rope_tables(self._local, torch.arange(seq), wide)
        cos, sin = (table.to(self.ranks.device) for table in tables)
        x = self._random(batch, seq, self._local.hidden_size, grad=True)
        inputs, grad = (x, *block.parameters()), torch.ones_like(x)
        seconds = self.seconds(lambda: torch.autograd.grad(block(x, cos, sin), inputs, grad))
        layout = replace(self.layout, micro_batch_size=batch, cp=1)
        options = replace(
            planner_options(self.config, self.cuda),
            seq_len=seq,
            activation_checkpoint="none",
            compile=compiled,
        )

        def predict(machine: Machine) -> float:
            return block_seconds(self.config.model, layout, options, machine)[0]

        how = "compiled" if compiled else "eager"
        return BlockTime(f"block, {how}: {batch} x {seq}", predict, seconds)

    def floor(self, compiled: bool) -> float:
        """Seconds in which forward and backward of a block are queued: what two more blocks take of
        a model so narrow that a device has next to nothing to do.

        On GPUs with what FSDP and tensor parallelism add. With gloo the host would wait for their
        collectives, which are counted by themselves.
        """
        one, three = (self._narrow(blocks, compiled) for blocks in (1, 3))
        return max(1e-6, three - one) / 2

    def _narrow(self, blocks: int, compiled: bool) -> float:
        config, tp, device = self.config, self.layout.tp, self.ranks.device
        narrow = {
            "hidden_size": 64,
            "intermediate_size": 64 * tp,
            "vocab_size": 64 * tp,
            "num_hidden_layers": blocks,
            "head_dim": config.model.head_size,
        }
        wide = torch.promote_types(self.dtype, torch.float32)
        with torch.device("meta"):
            model = Llama(config.model.model_copy(update=narrow)).to(wide)
        options = replace(
            planner_options(config, self.cuda),
            compile=compiled,
            activation_checkpoint="none",
            grad_compression="none",
            loss_chunks=1,
            cpu_offload=False,
            prefetch=None,
        )
        if self.cuda or self.layout.world_size == 1:
            parallelize(model, self.ranks.mesh, options, zero=self.layout.zero)
        else:
            apply_activation_checkpoint(model, "none", compiled=compiled)
            model.to(self.dtype)
        model.to_empty(device=device)
        init_weights(model, 0)
        tokens = torch.zeros(1, 16 * tp, dtype=torch.long, device=device)
        return self.seconds(lambda: model(tokens).float().sum().backward())

    def groups(self) -> dict[str, tuple[dist.ProcessGroup, int, int]]:
        """Group, size and stride of the mesh dims with several ranks, of the shards, and of all."""
        mesh, layout, groups, stride = self.ranks.mesh, self.layout, {}, 1
        for dim, size in reversed(layout.mesh_dims.items()):
            if size > 1:
                groups[dim] = mesh.get_group(dim), size, stride
            stride *= size
        if layout.shards > layout.cp > 1:
            groups["dp x cp"] = sharding_mesh(mesh).get_group(), layout.shards, layout.tp
        if all(size < layout.world_size for _, size, _ in groups.values()):
            groups["all"] = dist.group.WORLD, layout.world_size, 1
        return groups if layout.world_size > 1 else {}

    def collectives(self) -> list[Sent]:
        """Collectives of every group, in float32, small to large."""
        sent = []
        for dim, (group, size, stride) in self.groups().items():
            for mib in (1 / 16, 1, 16, 256) if self.cuda else (1 / 16, 1, 16):
                whole = torch.zeros(int(mib * MIB / 4) // size * size, device=self.ranks.device)
                for kind, call in self._calls(whole, group, size, dim == "pp").items():
                    seconds, ranks = self.seconds(call), 2 if kind == "send" else size
                    sent.append(Sent(dim, 4 * whole.numel(), ranks, stride, kind, seconds))
        return sent

    def _calls(self, whole: Tensor, group: dist.ProcessGroup, size: int, pipeline: bool) -> dict:
        part = torch.zeros_like(whole[: whole.numel() // size])
        calls = {
            "all_gather": lambda: dist.all_gather_into_tensor(whole, part, group=group),
            "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, whole, group=group),
            "all_reduce": lambda: dist.all_reduce(whole, group=group),
        }
        at = dist.get_rank(group)

        def send() -> None:
            # To the next of a pair; of an odd number the last has none.
            if at % 2:
                dist.recv(whole, group=group, group_src=at - 1)
            elif at + 1 < size:
                dist.send(whole, group=group, group_dst=at + 1)

        return calls | ({"send": send} if pipeline else {})

    def beside(self) -> tuple[float, float, float] | None:
        """Seconds of matrix products, of an all-gather, and of both at once, about as long each."""
        groups = self.groups()
        if not groups:
            return None
        name = next((n for n in ("dp x cp", "dp", "cp") if n in groups), next(iter(groups)))
        group, size, _ = groups[name]
        part = torch.zeros((64 if self.cuda else 4) * MIB // size, device=self.ranks.device)
        whole = part.new_empty(part.numel() * size)
        tokens, d = self.tokens[0] * self.tokens[1], self._local.hidden_size
        product = self._products(tokens, d, self._local.intermediate_size)[0]
        transfer = self.seconds(lambda: dist.all_gather_into_tensor(whole, part, group=group))
        times = max(1, round(transfer / self.seconds(product)))

        def compute() -> None:
            for _ in range(times):
                product()

        def both() -> None:
            work = dist.all_gather_into_tensor(whole, part, group=group, async_op=True)
            compute()
            work.wait()

        return self.seconds(compute), transfer, self.seconds(both)

    def run(self) -> Measured:
        """Everything."""
        ways = (False, True) if self.config.memory.compile else (False,)
        with warnings.catch_warnings():
            # torch 2.13 wants names of collectives that older versions lack.
            warnings.simplefilter("ignore", FutureWarning)
            return Measured(
                products=self.products(),
                attention=self.attention(),
                memory=self.memory(),
                floors=[self.floor(compiled) for compiled in ways],
                blocks=[self.block(compiled) for compiled in ways],
                sent=self.collectives(),
                beside=self.beside(),
            )
