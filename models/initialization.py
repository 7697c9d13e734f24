"""Initial weights that do not depend on the layout."""

import hashlib
import math

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from models.decoder import Llama
from models.weights import Weight, all_weights

# Elements drawn from one random stream. A rank draws whole chunks, so this bounds what it draws
# beyond its own rows; it is part of the definition of the weights.
CHUNK_ELEMENTS = 2**20


def initial_std(weight: Weight, hidden_size: int, num_hidden_layers: int) -> float:
    """Standard deviation of a matrix at the start.

    - ``sqrt(2 / (5 D))`` for every matrix ("SmallInit", Nguyen and Salazar 2019): the logits then
      start with a standard deviation of 0.63 at any width, and the loss close to ln(V);
    - ``1 / sqrt(2 L)`` of that for the two matrices that write into the residual stream of each
      block (``o_proj``, ``down_proj``), so that its variance does not grow with depth (GPT-2).
    """
    std = math.sqrt(2 / (5 * hidden_size))
    if weight.writes_residual:
        std /= math.sqrt(2 * num_hidden_layers)
    return std


def _chunks(seed: int, name: str, shape: tuple[int, int], first: int, last: int, std: float):
    """Rows [first, last) of a normal matrix ``shape``, as (first row, float32 block to copy)."""
    rows, columns = shape
    per_chunk = max(1, CHUNK_ELEMENTS // columns)
    key = int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:8], "little")
    buffer = np.empty((min(per_chunk, rows), columns), np.float32)
    for chunk in range(first // per_chunk, -(-last // per_chunk)):
        start = chunk * per_chunk
        block = buffer[: min(per_chunk, rows - start)]
        stream = np.random.Generator(np.random.Philox(key=[key, chunk]))
        stream.standard_normal(dtype=np.float32, out=block)
        block *= np.float32(std)
        low, high = max(first, start), min(last, start + per_chunk)
        yield low, block[low - start : high - start]


def local_part(parameter: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """This rank's part of a parameter as a plain tensor, and the global index of its first element.

    The part is a block of the whole, also where two dims of a mesh shard one dim.
    """
    if not isinstance(parameter, DTensor):
        return parameter, (0,) * parameter.ndim
    _, offset = compute_local_shape_and_global_offset(
        parameter.shape, parameter.device_mesh, parameter.placements
    )
    return parameter.to_local(), tuple(offset)


@torch.no_grad()
def init_weights(model: Llama, seed: int) -> None:
    """Fill every parameter: ones for norms, normal with :func:`initial_std` for matrices.

    Each value is a function of (seed, parameter name, global index) alone, drawn on the CPU in
    float32: the same on every layout, device and dtype. A rank draws its own rows plus at most
    one chunk, so the whole model never exists anywhere. Works on plain tensors and on DTensors
    with any sharding.
    """
    config, table = model.config, all_weights(model.config)
    for name, parameter in model.named_parameters():
        local, offset = local_part(parameter)
        if table[name].kind == "norm":
            local.fill_(1)
            continue
        if local.numel() == 0:
            continue
        std = initial_std(table[name], config.hidden_size, config.num_hidden_layers)
        columns = slice(offset[1], offset[1] + local.shape[1])
        last = offset[0] + local.shape[0]
        for row, block in _chunks(seed, name, parameter.shape, offset[0], last, std):
            target = local[row - offset[0] : row - offset[0] + len(block)]
            target.copy_(torch.from_numpy(block[:, columns]))
