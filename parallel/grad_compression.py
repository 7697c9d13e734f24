"""Pure data parallelism that sends gradients with fewer bytes: DDP and its communication hooks.

The model keeps plain, whole parameters under their own names, for optimizer, checkpoints and
fingerprints; the wrapper around it is for forward and backward alone. Not run on a GPU.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from models.config import LlamaConfig
from models.decoder import Llama
from parallel.layout import POWERSGD_RANK, POWERSGD_START

# What is sent, and by how much it is multiplied before. Gradients here are of a mean over the
# tokens of all ranks: many are below 6e-8, where float16 ends. A power of two moves its range, from
# 6e-11 to 64 per element of the sum, and costs no digit. Beyond 64 the sum is infinite, and the run
# stops at a step that changed nothing. bfloat16 has the range of float32.
SENT_AS = {"bf16": (torch.bfloat16, 1.0), "fp16": (torch.float16, 2.0**10)}
# Bytes of gradients that are sent together, while the backward goes on.
BUCKET_MB = 25.0


def set_compute_dtype(model: Llama, dtype: torch.dtype) -> None:
    """Have ``model`` compute in ``dtype``, as FSDP2's mixed precision does, from its own weights.

    DDP's own mixed precision brings a communication hook, and there can be one only; autocast would
    keep the residual stream in float32.
    """
    if dtype == torch.bfloat16:
        for module in model.modules():
            module.compute_dtype = dtype


class _LastFirst(nn.Module):
    """A model whose parameters are listed from the last to the first, as their gradients come."""

    def __init__(self, model: Llama):
        super().__init__()
        self.order = nn.ParameterList(list(model.parameters())[::-1])
        self.model = model

    def forward(self, *args, **kwargs) -> Tensor:
        """As the model."""
        return self.model(*args, **kwargs)


class Replica(DistributedDataParallel):
    """A model whose gradients are summed over all ranks by a compressing hook.

    Only what :func:`training.step.batch_loss` needs of the model is passed on.
    """

    def __init__(self, model: Llama, state: object, hook: Callable):
        super().__init__(
            # Buckets are filled in the order of the parameters, and sent one after another.
            _LastFirst(model),
            # Equal by construction: each value is a function of seed, name and index.
            init_sync=False,
            gradient_as_bucket_view=True,
            bucket_cap_mb=BUCKET_MB,
        )
        # DDP would fill the buckets anew after the first step. The order in which the ranks' parts
        # of a number are added depends on its place in a bucket, so that a run that goes on from a
        # checkpoint would differ by rounding from one that never stopped.
        self.reducer._push_all_rebuilt_params()
        self.reducer._rebuild_buckets()
        self.register_comm_hook(state, hook)

    @property
    def config(self) -> LlamaConfig:
        """The model's."""
        return self.module.model.config

    @property
    def lm_head(self) -> nn.Module:
        """The model's."""
        return self.module.model.lm_head


def replicate(model: Llama, compression: str) -> Llama | Replica:
    """The module to call in place of ``model``, whose parameters hold their values.

    It is ``model`` itself without compression, and on one process, where nothing is sent.

    Args:
        compression: "none", or what to lose: "bf16", "fp16" or "powersgd".
    """
    if compression == "none" or dist.get_world_size() == 1:
        return model
    if compression == "powersgd":
        state = PowerSGDState(
            None, matrix_approximation_rank=POWERSGD_RANK, start_powerSGD_iter=POWERSGD_START
        )
        return Replica(model, state, sum_low_rank)
    return Replica(model, SENT_AS[compression], sum_in_16_bits)


def sum_in_16_bits(sent_as: tuple[torch.dtype, float], bucket: dist.GradBucket) -> Future[Tensor]:
    """Sum a bucket over the ranks in 16 bits.

    torch's hooks of this kind divide by the number of ranks before they send, which costs float16
    its smallest numbers, and their one for bfloat16 refuses gloo. Here the sum itself is wanted, so
    nothing is divided.
    """
    dtype, scale = sent_as
    buffer = bucket.buffer()
    sent = torch.mul(buffer, scale, out=torch.empty_like(buffer, dtype=dtype))

    def receive(done: Future) -> Tensor:
        return buffer.copy_(done.value()[0]).mul_(1 / scale)

    return dist.all_reduce(sent, async_op=True).get_future().then(receive)


def sum_low_rank(state: PowerSGDState, bucket: dist.GradBucket) -> Future[Tensor]:
    """Sum a bucket over the ranks by factors of low rank.

    PowerSGD (Vogels et al. 2019): what the factors P Q^T miss of a matrix is kept on the rank and
    added to its next gradient (error feedback), and Q is where the next step starts. The first Q is
    drawn from a seed that all ranks share. Matrices too small for it, and vectors, are sent whole.
    """
    # torch's hook averages, over and over: n times the gradient averages to the sum.
    bucket.buffer().mul_(dist.get_world_size())
    done = powerSGD_hook(state, bucket)
    # Its later collectives start in callbacks, which gloo runs in no fixed order: those of two
    # buckets would meet each other, or wait for each other's thread. On a GPU nothing is lost by
    # this, since the hook waits for the device itself.
    done.wait()
    return done
