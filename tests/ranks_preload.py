"""Imported once by the fork server, before any rank is forked from it."""

# ruff: noqa: F401

import gc

import pytest
import torch
import torch._inductor.compile_fx
import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.distributed.tensor
import torch.distributed.tensor.parallel
import torch.profiler._cupti_monitor
import transformers.models.auto.tokenization_auto
import transformers.models.llama.modeling_llama
import typeguard
import tyro._backends._argparse_formatter
from torch._dynamo.backends.registry import lookup_backend

import parallel.data_parallel
import parallel.pipeline
import parallel.tensor_parallel
import training.data.tokens
import training.run.shutdown

# It imports all backends, as the first compilation of each rank would.
lookup_backend("aot_eager")
torch.set_num_threads(1)
# Nothing of this is ever garbage: a rank is not to search it, and to copy the pages by doing so.
gc.freeze()
