"""Activation checkpointing: what a block computes again in its backward instead of keeping it.

Chen et al. 2016; the selective kind after Korthikanti et al. 2022. The results are bitwise those
without it, since the same operations run on the same numbers.
"""

from functools import partial

import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from models.decoder import Llama

# Of torch.compile.
COMPILE_BACKEND = "inductor"
_aten, _comm = torch.ops.aten, torch.ops._c10d_functional
# What is dear to compute again: matrix products, attention, and what has crossed the network.
_KEPT = {
    _aten.mm.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _comm.all_reduce.default,
    _comm.all_gather_into_tensor.default,
    _comm.reduce_scatter_tensor.default,
}


def _policy(_, operation, *args, **kwargs) -> CheckpointPolicy:
    kept = operation in _KEPT
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def apply_activation_checkpoint(model: Llama, mode: str, *, compiled: bool = False) -> None:
    """Make every block of ``model`` compute again what it does not keep for the backward.

    Args:
        mode: "full" keeps the input of a block alone; "selective" also the results of matrix
            products, attention and collectives, so that only what is cheap is computed twice;
            "none" changes nothing.
        compiled: compile every block with ``torch.compile``, too.
    """
    if mode == "none" and not compiled:
        return
    # Nothing in a block draws random numbers.
    options = {"use_reentrant": False, "preserve_rng_state": False}
    selective = options | {"context_fn": partial(create_selective_checkpoint_contexts, _policy)}
    for block in model.model.layers.values():
        run = block.layer
        # The compiler must see which operations of a block are to be computed again. A whole block
        # is computed again from outside: within, AOTAutograd fails on the mesh of a DTensor.
        if mode == "selective":
            run = partial(checkpoint, run, **selective)
        if compiled:
            # The whole graph: a break, or one compilation per block, is an error, not just slow.
            run = torch.compile(run, backend=COMPILE_BACKEND, fullgraph=True)
        if mode == "full":
            run = partial(checkpoint, run, **options)
        block.run = run
