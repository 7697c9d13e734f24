"""Pretrain a Llama on a mesh of pipeline-, data-, context- and tensor-parallel ranks.

    torchrun --nproc-per-node 8 train_llm.py --tp 4

config -> mesh -> data -> model (meta) -> parallelize -> init -> optimizer -> resume -> train
"""

import os
import signal
import sys
from typing import TYPE_CHECKING

from common.output import run_command, say
from parallel.layout import Layout
from training.config.schema import Config
from training.run.launcher import Launcher
from training.start import load_config

if TYPE_CHECKING:
    from training.setup import Start


def main() -> None:
    """Train one run, or continue it."""
    launcher = Launcher()
    launcher.watch_start()
    # A training rank is asked by SIGUSR2 where it is; the signal must not end one that starts up.
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    # Bad input ends here, before torch is imported and before any process group is built.
    config, layout, launch = load_config(sys.argv[1:])
    # For CUDA's caching allocator: blocks that grow leave fewer holes between them.
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    if config.layout.print_plan:
        from training.plan import print_plan

        return print_plan(config, layout, launch)
    if launch.rank == 0:
        # What comes next takes seconds, and says nothing.
        processes = f"{layout.world_size} process{'es' if layout.world_size > 1 else ''}"
        what = f"recipe {config.recipe}, layout {layout.name} on {processes}"
        say(f"{what}, run directory {config.run_dir}; importing torch ...", sys.stdout)

    from parallel.mesh import init_ranks
    from training import setup
    from training.run.tokenizer import load_run_tokenizer

    with setup.refusing(launch):
        tokenizer = load_run_tokenizer(config, launch)
        setup.resolve_vocabulary(config, layout, tokenizer)
        store, offload = setup.meet_ranks(config, launch), config.memory.cpu_offload
        ranks = init_ranks(launch, layout, config.run.comm_timeout, offload, store)
        run, checkpoint = setup.open_run(config, ranks)
        data = setup.open_data(config, tokenizer, ranks)
        setup.check_data(config, data, checkpoint)
        start = setup.Start(ranks, run, checkpoint, data, tokenizer)
        setup.begin_run(config, layout, start)
    train_run(config, layout, start, launcher)


def train_run(config: Config, layout: Layout, start: "Start", launcher: Launcher) -> None:
    """From the model to the end, in the order in which it happens."""
    import torch

    from models.decoder import Llama
    from parallel import parallelize
    from training import plan, setup
    from training.checkpoint.saver import Checkpointer, Contents, TrainState, load_checkpoint
    from training.config.options import planner_options
    from training.loop import AgreedBatches, train
    from training.optimizers.sharded import ShardedOptimizer
    from training.run import shutdown
    from training.run.fingerprints import Fingerprints
    from training.run.garbage import collecting_together
    from training.run.metrics import Meter
    from training.run.observers import Observers
    from training.run.profiler import Profiler

    ranks, run, checkpoint, state = start.ranks, start.run, start.checkpoint, TrainState()
    prediction = plan.predict_run(config, layout, ranks.device)
    lines = plan.describe(config, layout, ranks, checkpoint, prediction) if not ranks.rank else []
    reporting = shutdown.reporting(run, config, layout, ranks, state, checkpoint, lines)
    with reporting as (reporter, heartbeat):
        meter = Meter(config, layout, ranks.device)
        with torch.device("meta"):
            model = Llama(config.model).to(setup.parameter_dtype(config))
        options = planner_options(config, ranks.device.type == "cuda")
        stages = layout.rank_stages(config.model, config.step.seq_len, ranks.pp_rank)
        parts = parallelize(model, ranks.mesh, options, zero=layout.zero, stages=stages)
        setup.materialise(model, config, ranks, checkpoint)
        optimizer = ShardedOptimizer(model, config.optimizer)
        contents = Contents(model, optimizer, state, ranks)
        if checkpoint:
            load_checkpoint(checkpoint, contents)
        engine = setup.make_engine(config, contents, layout, parts, stages)
        recorded = run.fingerprints_jsonl, config.run.fingerprint_steps
        fingerprints = Fingerprints(model, parts, optimizer, layout, ranks, *recorded)
        profiler = Profiler(config.run.profile, run.profile, ranks)
        observers = Observers(reporter, meter, heartbeat, fingerprints, profiler)
        # From here on a signal means: finish the step, save, and leave.
        asked = shutdown.stop_requests(config.run.stop_after, run, ranks, launcher)
        batches = AgreedBatches(start.data, state.step, config, layout, ranks, asked)
        saving = Checkpointer(
            run.checkpoints,
            contents,
            config.run,
            identity=setup.run_identity(config, start),
            started_from=checkpoint,
            report=shutdown.report_save(run, ranks, reporter),
            check_held=run.check_held,
        )
        with collecting_together(), saving as checkpointer:
            stopped = train(engine, batches, start.data, state, config, observers, checkpointer)
        planned = prediction.beside(optimizer.held_bytes(), reporter.rows) if reporter else []
        shutdown.finish(stopped, run, state, ranks, reporter, heartbeat, planned)


if __name__ == "__main__":
    run_command(main, "train_llm.py")
