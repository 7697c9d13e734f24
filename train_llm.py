"""Pretrain a Llama on a mesh of pipeline-, data-, context- and tensor-parallel ranks.

    torchrun --nproc-per-node 8 train_llm.py --tp 4

config -> mesh -> data -> model (meta) -> parallelize -> init -> optimizer -> resume -> train
"""

import os
import signal
import sys
import time
from functools import partial

from common.output import run_command, say
from training.config.values import step_range
from training.run.launcher import Launcher
from training.start import load_config


def main() -> None:
    """Train one run, or continue it."""
    started, launcher = time.monotonic(), Launcher()
    launcher.watch_start()
    # It asks all ranks where they are, once they train, and is to end none that still starts up.
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    # Bad input ends here, before torch is imported and before any process group is built.
    config, layout, launch = load_config(sys.argv[1:])
    # CUDA's caching allocator reads it once: blocks that grow leave fewer holes between them.
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    if launch.rank == 0 and not config.layout.print_plan:
        # What comes next takes seconds, and says nothing.
        processes = f"{layout.world_size} process{'es' if layout.world_size > 1 else ''}"
        what = f"recipe {config.recipe}, layout {layout.name} on {processes}"
        say(f"{what}, run directory {config.run_dir}; importing torch ...", sys.stdout)

    import torch

    from models.decoder import Llama
    from models.hf import load_weights
    from models.initialization import init_weights
    from parallel import parallelize
    from parallel.grad_compression import replicate
    from parallel.mesh import init_ranks
    from training import setup as start
    from training.checkpoint.saver import Checkpointer, Progress, load_checkpoint
    from training.loop import train
    from training.optimizers.sharded import ShardedOptimizer
    from training.run import shutdown as ending
    from training.run.fingerprints import Fingerprints
    from training.run.garbage import collecting_together
    from training.run.metrics import Meter
    from training.run.profiler import Profiler
    from training.run.tokenizer import load_run_tokenizer

    if config.layout.print_plan:
        return start.print_plan(config, layout, launch)

    with start.refusing(launch):
        tokenizer = load_run_tokenizer(config, launch)
        start.resolve_vocabulary(config, layout, tokenizer)
        store = start.meet_ranks(config, launch)
        cpu_offload = config.memory.cpu_offload
        ranks = init_ranks(launch, layout, config.run.comm_timeout, cpu_offload, store)
        run, checkpoint = start.open_run(config, ranks)
        data = start.open_data(config, tokenizer, ranks)
        start.check_data(config, data, checkpoint)
        start.begin_run(config, layout, ranks, run, checkpoint, tokenizer)

    progress, prediction = Progress(), start.predict_run(config, layout, ranks.device)
    reporting = ending.reporting(run, config, layout, ranks, checkpoint, progress, prediction)
    with reporting as (reporter, heartbeat):
        meter = Meter(config, layout, ranks.device)
        with torch.device("meta"):
            model = Llama(config.model).to(start.parameter_dtype(config))
        options = start.parallel_options(config, ranks) | config.memory.model_dump()
        stages = layout.rank_stages(config.model, config.step.seq_len, ranks.pp_rank)
        parts = parallelize(model, ranks.mesh, zero=layout.zero, stages=stages, **options)
        pipeline = start.make_pipeline(config, parts, stages, layout, ranks)
        model.to_empty(device="cpu" if config.memory.cpu_offload else ranks.device)
        if not checkpoint and config.init_from:
            load_weights(config.init_from, model)
        elif not checkpoint:
            init_weights(model, config.step.seed)
        optimizer = ShardedOptimizer(model, config.optimizer)
        if checkpoint:
            load_checkpoint(checkpoint, model, optimizer, progress, ranks)
        # Mostly the model itself; a wrapper is called in its place, and has no part in the rest.
        trained = replicate(model, config.memory.grad_compression)

        fingerprints = None
        if config.run.fingerprint_steps:
            fingerprints = Fingerprints(
                model, parts, optimizer, layout, ranks, run.fingerprints_jsonl,
                config.run.fingerprint_steps,
            )  # fmt: skip

        profiler = None
        if config.run.profile:
            profiler = Profiler(step_range(config.run.profile), run.profile, ranks)

        # From here on a signal means: finish the step, save, and leave.
        stop_requested = ending.stop_requests(started, config.run.stop_after, run, ranks, launcher)
        with collecting_together(), Checkpointer(
            run.checkpoints, model, optimizer, progress, ranks, config.run,
            identity=start.run_identity(config, data, tokenizer), started_from=checkpoint,
            report=ending.report_save(run, ranks, reporter), check_held=run.check_held,
        ) as checkpointer:  # fmt: skip
            stopped = train(
                trained, optimizer, data, progress, config, layout, ranks,
                pipeline=pipeline, reporter=reporter, meter=meter, fingerprints=fingerprints,
                profiler=profiler, checkpointer=checkpointer, heartbeat=heartbeat,
                stop_requested=stop_requested,
            )  # fmt: skip
        planned = partial(prediction.beside, optimizer.held_bytes())
        ending.finish(stopped, run, progress, ranks, reporter, heartbeat, planned)


if __name__ == "__main__":
    run_command(main, "train_llm.py")
