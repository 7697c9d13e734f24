"""Fingerprints of a training step: numbers that are equal on every layout, or name what is not.

A fingerprint of a tensor is a pair: its projection on a fixed pseudo-random direction, and its
squared norm, both in float64. Each rank sums over the part it holds, weighted by global index, and
one all-reduce adds the parts up: nothing is gathered. Which part a rank holds follows from a
parameter's placements, and for an activation from what its tensor-parallel style declares on the
module (``output_placement``, ``output_start``, ``output_counts``).
"""

import json
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from models.decoder import Llama
from parallel.layout import Layout
from parallel.mesh import Ranks
from training.optimizers.sharded import ShardedOptimizer, counts_here

# The stages of a step, in their order: a fault begins at the first one that differs.
STAGES = ("tokens", "weights", "activations", "loss", "gradients", "grad_norm", "new_weights")


Start = int | Tensor  # global index of the first element, or of every element, of a dim


def _hash(start: Start, length: int, salt: int, device: torch.device) -> Tensor:
    """Pseudo-random int64 of each index, the same on every device."""
    if isinstance(start, Tensor):
        x = start.to(device)
    else:
        x = torch.arange(start, start + length, dtype=torch.int64, device=device)
    for multiplier in (0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9):
        x = (x + salt) * multiplier
        x = x ^ (x >> 31)
    return x


def _direction(start: Start, length: int, dim: int, device: torch.device) -> Tensor:
    """Weights in [-1, 1) of the indices of one dim, float64."""
    return (_hash(start, length, dim + 1, device) >> 11).double() / 2**52


def project(x: Tensor, start: tuple[Start, ...]) -> Tensor:
    """[projection, squared norm] of this part of a tensor, float64.

    Args:
        start: global index in each dim, of the first element or of all of them.
    """
    x = x.detach().double()
    norm = x.square().sum()
    for dim in reversed(range(x.ndim)):
        x = x @ _direction(start[dim], x.shape[dim], dim, x.device)
    return torch.stack((x, norm))


def project_parameter(p: Tensor) -> Tensor:
    """[projection, squared norm] of this rank's part of a parameter, or zeros for a replica."""
    local = p.detach()._local_tensor if isinstance(p, DTensor) else p.detach()
    if not counts_here(p) or not local.numel():
        return torch.zeros(2, dtype=torch.float64, device=local.device)
    if not isinstance(p, DTensor):
        return project(local, (0,) * p.ndim)
    _, start = compute_local_shape_and_global_offset(p.shape, p.device_mesh, p.placements)
    return project(local, start)


class Fingerprints:
    """Records the stages of a run's first steps in ``fingerprints.jsonl``, an object for each.

    Every method is called on all ranks; :meth:`end` is the only one that communicates.
    """

    def __init__(
        self,
        model: Llama,
        parts: list[Llama],
        optimizer: ShardedOptimizer,
        layout: Layout,
        ranks: Ranks,
        path: Path,
        steps: int,
    ):
        """
        Args:
            parts: what a forward runs through: the pipeline stages of this rank, or the model.
            steps: optimizer steps from the start of the run that are recorded; 0: none.
        """
        self._optimizer, self._layout, self._ranks = optimizer, layout, ranks
        self._path, self.steps = path, steps
        self._step, self._micro_batches = None, dict.fromkeys(parts, 0)
        self._values: dict[str, dict[str, Tensor]] = {}  # by stage and name
        self._running: nn.Module | None = None
        self._positions = parts[0].positions
        # All ranks add up the same numbers, also those of pipeline stages that are elsewhere.
        self._names = list(model.config.parameter_shapes)
        for part in parts if steps else ():
            part.register_forward_pre_hook(self._next_micro_batch)
            part.register_forward_hook(self._forward_done)
        for name, module in model.named_modules() if steps else ():
            if not list(module.children()):
                module.register_forward_hook(self._activation_hook(name))

    def begin(self, step: int, batch: list[tuple[Tensor, Tensor]]) -> None:
        """Start recording step ``step`` (1-based) if it is one of the first."""
        self._step = step if step <= self.steps else None
        if self._step is None:
            return
        self._micro_batches = dict.fromkeys(self._micro_batches, -1)
        self._values = {stage: {} for stage in STAGES}
        # A tied head is a module all the same.
        modules = [name.removesuffix(".weight") for name in self._names]
        for name in dict.fromkeys([*modules, "lm_head"]):
            self._values["activations"][name] = self._zero()
        self._tokens(batch)
        if step == 1:
            self._parameters("weights", lambda p: p)

    def gradients(self) -> None:
        """Record the gradients, once the backward is done and before clipping."""
        if self._step is not None:
            self._parameters("gradients", lambda p: p.grad)

    def end(self, loss: Tensor, grad_norm: Tensor) -> None:
        """Record the rest, add up over the ranks, and write."""
        if self._step is None:
            return
        first = torch.zeros(2, dtype=torch.float64, device=loss.device)
        mine = float(self._ranks.rank == 0)
        self._values["loss"] = {"loss": first + loss * mine}
        self._values["grad_norm"] = {"grad_norm": first + grad_norm * mine}
        self._parameters("new_weights", lambda p: p)
        for values in (list(self._values["tokens"].values()), self._floats()):
            if values:
                total = torch.stack(values)
                dist.all_reduce(total)
                for value, summed in zip(values, total, strict=True):
                    value.copy_(summed)
        if self._ranks.rank == 0:
            with self._path.open("a", encoding="utf-8") as f:
                for stage, tensors in self._values.items():
                    values = {name: value.tolist() for name, value in tensors.items()}
                    if stage == "activations":
                        # What no rank has seen, as the inside of a compiled block.
                        values = {name: value for name, value in values.items() if any(value)}
                    line = {"step": self._step, "stage": stage, "values": values}
                    f.write(json.dumps(line) + "\n")
        self._step = None

    def _zero(self) -> Tensor:
        return torch.zeros(2, dtype=torch.float64, device=self._ranks.device)

    def _floats(self) -> list[Tensor]:
        return [v for stage in STAGES[1:] for v in self._values[stage].values()]

    def _first_sequence(self, micro_batch: int) -> int:
        """Global index of the first sequence of a micro-batch of this rank."""
        layout = self._layout
        return layout.micro_batch_size * (self._ranks.dp_rank * layout.micro_batches + micro_batch)

    def _tokens(self, batch: list[tuple[Tensor, Tensor]]) -> None:
        """Hashes of the token ids, exact modulo 2**64."""
        for k, name in enumerate(("inputs", "targets")):
            total = torch.zeros(2, dtype=torch.int64, device=self._ranks.device)
            for number, pair in enumerate(batch):
                tokens, first = pair[k], self._first_sequence(number)
                rows = _hash(first, tokens.shape[0], 1, tokens.device).unsqueeze(1)
                columns = _hash(self._positions(tokens.shape[1]), 0, 2, tokens.device)
                here = ((tokens + 101) * (rows ^ columns)).sum()
                # The second number is zero where all tp and pp ranks of a dp rank read the same.
                counts = int(self._ranks.tp_rank == self._ranks.pp_rank == 0)
                readers = self._layout.tp * len(self._layout.data_pp_ranks)
                total += torch.stack((here * counts, here * (1 - counts * readers)))
            self._values["tokens"][name] = total

    def _parameters(self, stage: str, of: Callable[[Tensor], Tensor]) -> None:
        optimizer = self._optimizer
        self._values[stage] = {name: self._zero() for name in self._names}
        for name, p in zip(optimizer.names, optimizer.parameters, strict=True):
            self._values[stage][name] = project_parameter(of(p)).to(self._ranks.device)

    def _next_micro_batch(self, part: nn.Module, _) -> None:
        # Each pipeline stage sees the micro-batches in order.
        self._micro_batches[part] += 1
        self._running = part

    def _forward_done(self, *_) -> None:
        self._running = None

    def _activation_hook(self, name: str) -> Callable:
        def hook(module: nn.Module, _, output: Tensor) -> None:
            # Compiled blocks are not looked into: their other numbers tell, too.
            if torch.compiler.is_compiling():
                return
            # A block that computes something again, in the backward, calls its modules once more.
            if self._step is not None and self._running is not None and output.ndim == 3:
                self._values["activations"][name] += self._project_output(module, output)

        return hook

    def _project_output(self, module: nn.Module, output: Tensor) -> Tensor:
        """[projection, squared norm] of this rank's part of a module's output [B, S, width]."""
        tp_rank = self._ranks.tp_rank
        length, column = output.shape[1], module.output_start
        placement, counts = module.output_placement, module.output_counts
        if placement is None or placement.is_replicate():
            counts = tp_rank == 0
        if not counts:
            return torch.zeros(2, dtype=torch.float64, device=output.device)
        if placement is not None and placement.is_shard(1):
            whole = self._positions(length * self._layout.tp)
            sequence = whole[tp_rank * length : (tp_rank + 1) * length]
        else:
            sequence = self._positions(length)
        first = self._first_sequence(self._micro_batches[self._running])
        return project(output, (first, sequence, column))
