"""What is said of a run before its first step: its plan, and what it is."""

from pathlib import Path

import torch
import torch.distributed as dist

from models.decoder import Llama
from parallel import parallelize
from parallel.launch import Launch
from parallel.layout import Layout
from parallel.mesh import Ranks, make_mesh
from planner.collectives import collectives
from planner.machine import load_machine, table_name
from planner.prediction import Prediction, predict
from planner.print_plan import describe_pipeline, format_plan, parameter_rows
from training.config.options import planner_options
from training.config.schema import Config
from training.data.tokenizer import load_tokenizer
from training.setup import parameter_dtype, refusing, resolve_vocabulary


def print_plan(config: Config, layout: Layout, launch: Launch) -> None:
    """Print what rank 0 would hold and send under ``layout``. One process stands for all ranks.

    Of a pipeline, also what ranks of the second and the last coordinate send.
    """
    if launch.rank != 0:
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore

    with refusing(launch):
        if config.model.vocab_size is None:
            resolve_vocabulary(config, layout, load_tokenizer(config.data.tokenizer))
    dist.init_process_group("fake", rank=0, world_size=layout.world_size, store=FakeStore())
    ranks = Ranks(launch, torch.device("cpu"), make_mesh("cpu", layout), None, None)
    options, seq_len = planner_options(config, cuda=False), config.step.seq_len
    with torch.device("meta"):
        model = Llama(config.model).to(parameter_dtype(config))
    shown = sorted({0, min(1, layout.pp - 1), layout.pp - 1})
    stages = {i: layout.rank_stages(config.model, seq_len, i) for i in shown}
    parallelize(model, ranks.mesh, options, zero=layout.zero, stages=stages[0])
    sent = {i: collectives(config.model, layout, options, seq_len, stages[i]) for i in shown}
    print(format_plan(parameter_rows(model), sent, config.model, layout, seq_len))
    print(f"\n{predict(config.model, layout, options, None).lines()[0]}")
    dist.destroy_process_group()


def predict_run(config: Config, layout: Layout, device: torch.device) -> Prediction:
    """What the planner says of the run; the table of GPUs is of bfloat16."""
    cuda, dtype, file = device.type == "cuda", config.step.dtype, config.run.calibration
    name = torch.cuda.get_device_name(device) if cuda else "a CPU"
    machine = None
    unknown = (
        f"{name} in {dtype} is not in the table of GPUs (recipes.plan --calibrate measures it)"
    )
    if file:
        machine = load_machine("", file)
        if machine.dtype not in (None, dtype):
            machine, unknown = None, f"{file} is of {machine.dtype}, and this is {dtype}"
    elif cuda and dtype == "bfloat16" and (gpu := table_name(name)):
        machine = load_machine(gpu)
    return predict(config.model, layout, planner_options(config, cuda), machine, unknown)


def describe(
    config: Config,
    layout: Layout,
    ranks: Ranks,
    checkpoint: Path | None,
    prediction: Prediction,
) -> list[str]:
    """What a person wants to see before the first step, a line each."""
    step, model, cuda = config.step, config.model, ranks.device.type == "cuda"
    sequence_parallel = planner_options(config, cuda).sequence_parallel
    device = f"{torch.cuda.get_device_name()}, nccl" if cuda else "CPU, gloo"
    sizes = [("pp", layout.pp), ("dp-replicate", layout.dp_replicate), ("dp", layout.dp)]
    sizes += [("cp", layout.cp), ("tp", layout.tp)]
    dims = " x ".join(f"{name} {size}" for name, size in sizes if size > 1 or name in ("dp", "tp"))
    lines = [
        f"layout {layout.name}: {dims} on {layout.world_size} processes ({device}), "
        f"ZeRO-{layout.zero}, "
        f"sequence parallel {'on' if sequence_parallel else 'off'}",
        f"model {model.num_parameters:,} parameters, vocabulary {model.vocab_size}, {step.dtype}",
        f"batch {step.global_batch_size} sequences of {step.seq_len} tokens a step = "
        f"dp {layout.data_ranks} x {layout.micro_batches} micro-batches x "
        f"{layout.micro_batch_size} sequences",
    ]
    if layout.pp > 1:
        lines.append(describe_pipeline(layout))
    compression = config.memory.grad_compression
    if compression != "none" and layout.world_size > 1:
        lines.append(f"gradients are sent as {compression}, which loses digits")
    if checkpoint:
        lines.append(f"resumed from {checkpoint}")
        if compression == "powersgd" and layout.world_size > 1:
            lines.append(
                "what PowerSGD had kept back is not in a checkpoint: its error feedback begins at "
                "zero, and this run differs a little from one that was not stopped"
            )
    elif config.init_from:
        lines.append(f"initial weights from {config.init_from}")
    return [*lines, *prediction.lines()]
