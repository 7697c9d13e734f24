"""How much of a GPU's peak a training step reaches (MFU), and what keeps it from more.

    python -m benchmarks.gpu
    torchrun --nproc-per-node 8 -m benchmarks.gpu --tp 2

bfloat16, synthetic tokens: the 1B model, and four blocks of the size of the 8B one with a small
vocabulary, each eager and compiled, with and without activation checkpointing, beside transformers'
Llama with the same dimensions (on one process). Takes about eight minutes on one GPU. Flags of
train_llm.py apply to all of them.
"""

import gc
import json
import sys
import time

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from benchmarks.ranks import Training, write_json
from models.config import flops_per_token
from parallel.launch import read_launch
from planner.machine import peak_flops
from training.config.command_line import parse_flags

MODELS = {
    "1B": ["--recipe", "llama3_1b", "--seq-len", "4096"],
    "four 8B blocks": [
        "--recipe",
        "llama3_8b",
        "--seq-len",
        "4096",
        "--num-hidden-layers",
        "4",
        "--vocab-size",
        "32768",
    ],
}
OPTIONS = {
    "eager": [],
    "compiled": ["--compile"],
    "eager, every second block checkpointed": ["--activation-checkpoint", "every-2"],
    "eager, full checkpointing": ["--activation-checkpoint", "full"],
    "compiled, full checkpointing": ["--compile", "--activation-checkpoint", "full"],
}
WARM_UP, STEPS, SEQUENCES = 3, 8, 4


class Transformers:
    """transformers' Llama in bfloat16 with float32 master weights under autocast, fused AdamW."""

    def __init__(self, flags: list[str]):
        from transformers import LlamaConfig, LlamaForCausalLM

        self.config = config = parse_flags(flags, console=False)
        model = config.model
        fields = model.model_dump(exclude={"rope_scaling", "rope_theta"}, exclude_none=True)
        with torch.device("cuda"):
            self.model = LlamaForCausalLM(LlamaConfig(**fields, use_cache=False))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        shape = (config.step.micro_batch_size, config.step.seq_len)
        self._tokens = torch.randint(0, model.vocab_size, shape, device="cuda")
        self.tokens_per_step = self._tokens.numel()

    def step(self) -> None:
        """One optimizer step with clipping."""
        with torch.autocast("cuda", torch.bfloat16):
            logits = self.model(input_ids=self._tokens).logits
        loss = torch.nn.functional.cross_entropy(
            logits.float().flatten(0, 1), self._tokens.flatten()
        )
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()


def measure(trainer, world_size: int) -> dict:
    """MFU, memory and the share of the time in which the GPU computes."""
    for _ in range(WARM_UP):
        trainer.step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    started = time.perf_counter()
    for _ in range(STEPS):
        trainer.step()
    torch.cuda.synchronize()
    seconds = (time.perf_counter() - started) / STEPS
    config = trainer.config
    tokens = trainer.tokens_per_step / seconds / world_size
    flops = tokens * flops_per_token(config.model, config.step.seq_len)
    peak = peak_flops(torch.cuda.get_device_name(), "bfloat16")
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        trainer.step()
        torch.cuda.synchronize()
    kernels = sorted(profiler.key_averages(), key=lambda e: -e.self_device_time_total)
    busy = sum(event.self_device_time_total for event in kernels) / 1e6
    return {
        "step_s": seconds,
        "tokens_per_s_per_device": tokens,
        "tflops_per_device": flops / 1e12,
        "mfu": flops / peak if peak else None,
        "peak_memory_bytes": torch.cuda.max_memory_allocated(),
        # Kernels on several streams overlap, so this can be above 1.
        "busy": busy / seconds,
        "kernels": {e.key: e.self_device_time_total / 1e6 for e in kernels[:12]},
    }


def main() -> int:
    """Measure everything that fits, print a row for each, write JSON."""
    if not torch.cuda.is_available():
        print("benchmarks.gpu: error: there is no CUDA device here", file=sys.stderr)
        return 2
    launch, records = read_launch(), []
    per_step = ["--global-batch-size", str(SEQUENCES * launch.world_size)]
    cases = [(m, o, [*MODELS[m], *OPTIONS[o], *per_step]) for m in MODELS for o in OPTIONS]
    if launch.world_size == 1:
        small = ["--micro-batch-size", str(SEQUENCES)]
        cases += [(m, "transformers", [*MODELS[m], *per_step, *small]) for m in MODELS]
    for model, option, flags in cases:
        torch.manual_seed(0)
        flags = [*flags, *sys.argv[1:]]
        try:
            trainer = Transformers(flags) if option == "transformers" else Training(launch, flags)
            found = measure(trainer, launch.world_size)
        except torch.OutOfMemoryError:
            found = {"mfu": None, "error": "out of memory"}
        records.append({"model": model, "option": option, **found})
        if launch.rank == 0:
            print(json.dumps({k: v for k, v in records[-1].items() if k != "kernels"}), flush=True)
        trainer = None
        if dist.is_initialized():
            dist.destroy_process_group()
        gc.collect()
        torch.cuda.empty_cache()
        torch._dynamo.reset()
    if launch.rank == 0:
        write_json("gpu", records)
    return 0


if __name__ == "__main__":
    sys.exit(main())
