"""Activation checkpointing: blocks that compute their forward again instead of keeping it.

Chen et al. 2016. The results are bitwise those without it, since the same operations run on the
same numbers.
"""

from functools import partial

import torch
from torch.utils.checkpoint import checkpoint

from models.decoder import Llama
from parallel.options import checkpoint_every

# Of torch.compile.
COMPILE_BACKEND = "inductor"


def apply_activation_checkpoint(model: Llama, mode: str, *, compiled: bool = False) -> None:
    """Make blocks of ``model`` keep their input alone for the backward.

    Args:
        mode: "full": all of them; "every-N": those whose number N divides; "none": no block.
        compiled: compile every block with ``torch.compile``, too.
    """
    every = checkpoint_every(mode)
    if not every and not compiled:
        return
    for number, block in model.model.layers.items():
        run = block.layer
        if compiled:
            # The whole graph: a break, or one compilation per block, is an error, not just slow.
            run = torch.compile(run, backend=COMPILE_BACKEND, fullgraph=True)
        if every and int(number) % every == 0:
            # From outside: within a compiled block, AOTAutograd fails on the mesh of a DTensor.
            # Nothing in a block draws random numbers.
            run = partial(checkpoint, run, use_reentrant=False, preserve_rng_state=False)
        block.run = run
