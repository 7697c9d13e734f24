"""What of a config other rooms are told, as their own types. Torch-free."""

from dataclasses import replace

import tomli_w

from parallel.layout import Dims, Layout, make_layout, use_sequence_parallel
from planner.memory import Options
from training.config.schema import Config


def planner_options(config: Config, cuda: bool = True) -> Options:
    """How a run is computed, for ``parallelize()`` and the planner.

    Args:
        cuda: whether it runs on CUDA, which decides about ``--sequence-parallel auto``.
    """
    layout, step, optimizer = config.layout, config.step, config.optimizer
    local_len = step.seq_len // layout.cp
    options = Options(
        **config.memory.model_dump(),
        seq_len=step.seq_len,
        sequence_parallel=use_sequence_parallel(
            layout.sequence_parallel, tp=layout.tp, local_len=local_len, cuda=cuda
        ),
        dtype=step.dtype,
        cuda=cuda,
        moment_bytes=0,
    )
    if optimizer.optimizer == "sgd":
        return options
    rounded = optimizer.optimizer_state_dtype == "bfloat16"
    return replace(options, moment_bytes=2 if rounded else options.wide_bytes)


def config_layout(config: Config, world_size: int) -> Layout:
    """The layout of ``world_size`` processes.

    Raises:
        LayoutError: if the sizes do not divide.
    """
    layout = config.layout
    return make_layout(
        world_size,
        Dims(pp=layout.pp, dp_replicate=layout.dp_replicate, cp=layout.cp, tp=layout.tp),
        global_batch_size=config.step.global_batch_size,
        micro_batch_size=config.step.micro_batch_size,
        zero=layout.zero,
        pp_schedule=layout.pp_schedule,
    )


def to_toml(config: Config) -> str:
    """The resolved config as a recipe that can be read again."""
    return tomli_w.dumps(config.model_dump(mode="json", exclude_none=True))
