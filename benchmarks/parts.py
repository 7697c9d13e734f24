"""Parts of a block on one core, computed in one way and in another.

    python -m benchmarks.parts

Milliseconds of CPU time of a forward and backward, the best of several rounds, float32, of as much
as a rank has of hidden 256, feed-forward 704, 8 heads and 4 sequences of 256 tokens.
"""

import sys
import time
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.ranks import write_json
from common.text import columns
from models.layers import _RMSNorm, _SwiGLULinear

BATCH, SEQ_LEN, HIDDEN, FEED_FORWARD = 4, 256, 256, 704
ROUNDS, REPEATS = 7, 30


def cpu_ms(function: Callable[[], None]) -> float:
    """CPU milliseconds of a call."""
    best = float("inf")
    for _ in range(ROUNDS):
        started = time.thread_time()
        for _ in range(REPEATS):
            function()
        best = min(best, (time.thread_time() - started) / REPEATS)
    return best * 1e3


def _weight(*shape: int) -> Tensor:
    return torch.randn(shape, requires_grad=True)


def pairs(tp: int) -> Iterator[tuple[str, str, Callable[[], None], str, Callable[[], None]]]:
    """What is computed, and two ways with their names; the trainer's is the second."""
    x, grad = _weight(BATCH, SEQ_LEN, HIDDEN), torch.randn(BATCH, SEQ_LEN, HIDDEN)
    flat, scale = x.detach().flatten(0, 1).requires_grad_(), _weight(HIDDEN)
    yield (
        "norm",
        "F.rms_norm",
        lambda: F.rms_norm(x, (HIDDEN,), scale, 1e-5).backward(grad),
        "one function",
        lambda: _RMSNorm.apply(flat, scale, 1e-5).backward(grad.flatten(0, 1)),
    )
    q, f = HIDDEN // tp, FEED_FORWARD // tp
    three = [_weight(q, HIDDEN) for _ in range(3)]
    grads = [torch.randn(BATCH, SEQ_LEN, q) for _ in range(3)]

    def fused() -> None:
        torch.autograd.backward(F.linear(x, torch.cat(three)).split(q, dim=-1), grads)

    def apart() -> None:
        torch.autograd.backward([F.linear(x, weight) for weight in three], grads)

    yield "queries, keys, values", "one product of weights put together", fused, "three", apart
    gate_up, down = [_weight(f, HIDDEN) for _ in range(2)], _weight(HIDDEN, f)

    def fused_feed_forward() -> None:
        gate, up = F.linear(x, torch.cat(gate_up)).split(f, dim=-1)
        _SwiGLULinear.apply(gate, up, down).backward(grad)

    def feed_forward() -> None:
        gate, up = (F.linear(x, weight) for weight in gate_up)
        _SwiGLULinear.apply(gate, up, down).backward(grad)

    def kept_feed_forward() -> None:
        gate, up = (F.linear(x, weight) for weight in gate_up)
        F.linear(F.silu(gate) * up, down).backward(grad)

    yield "gate, up", "one product of weights put together", fused_feed_forward, "two", feed_forward
    yield "feed-forward", "all kept", kept_feed_forward, "product formed again", feed_forward


def main() -> int:
    """Print a line for each pair and tp, and write them as JSON."""
    torch.set_num_threads(1)
    rows = []
    for tp in (1, 2, 4):
        for what, other, one, ours, two in pairs(tp):
            there, here = cpu_ms(one), cpu_ms(two)
            rows.append(
                (tp, what, f"{other}: {there:.2f}", f"{ours}: {here:.2f}", f"{here / there:.2f}")
            )
    print("\n".join(columns([("tp", "what", "ms", "ms, as it is", "ratio"), *rows])))
    write_json("parts", rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
