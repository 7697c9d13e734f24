"""Imported once by the fork server, before any rank is forked from it."""

import torch
import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.distributed.tensor
import torch.distributed.tensor.parallel
import transformers.models.auto.tokenization_auto
import transformers.models.llama.modeling_llama  # noqa: F401

import parallel.data_parallel
import parallel.tensor_parallel  # noqa: F401

torch.set_num_threads(1)
