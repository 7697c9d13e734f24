"""Pretrain a Llama on a (dp, tp) mesh.

    torchrun --nproc-per-node 8 train_llm.py --tp 4

config -> mesh -> data -> model (meta) -> parallelize -> init -> optimizer -> resume -> train
"""

import signal
import sys

from training.checks import load_config


def main() -> None:
    """Train one run, or continue it."""
    # Bad input ends here, before torch is imported and before any process group is built.
    config, layout, launch = load_config(sys.argv[1:])

    import torch

    from models.initialization import init_weights
    from models.llama import Llama
    from parallel import parallelize
    from parallel.mesh import init_ranks
    from training import start
    from training.checkpoint import Progress, load_checkpoint, save_checkpoint
    from training.fingerprint import Fingerprints
    from training.loop import train
    from training.metrics import Meter
    from training.optimizer import ShardedOptimizer
    from training.tokens import load_tokenizer

    if config.layout.print_plan:
        return start.print_plan(config, layout, launch)

    with start.refusing(launch):
        tokenizer = load_tokenizer(config.data.tokenizer)
        start.resolve_vocabulary(config, layout, tokenizer)
        ranks = init_ranks(launch, layout, config.run.comm_timeout)
        run, checkpoint = start.open_run(config, ranks)
        say = print if ranks.rank == 0 else lambda *_: None
        data = start.open_data(config, tokenizer, ranks, say)
        start.check_data(config, data, checkpoint)
    start.begin_run(config, layout, ranks, run, checkpoint)

    progress = Progress()
    with start.reporting(run, config, layout, ranks, checkpoint, progress) as reporter:
        meter = Meter(config, layout, ranks.device)
        with torch.device("meta"):
            model = Llama(config.model).to(start.parameter_dtype(config))
        parallelize(model, ranks.mesh, **start.parallel_options(config, ranks))
        model.to_empty(device=ranks.device)
        init_weights(model, config.step.seed)
        optimizer = ShardedOptimizer(model, config.optimizer)
        if checkpoint:
            load_checkpoint(checkpoint, model, optimizer, progress, ranks)

        fingerprints = None
        if config.run.fingerprint_steps:
            fingerprints = Fingerprints(
                model,
                optimizer,
                layout,
                ranks,
                run.fingerprints_jsonl,
                config.run.fingerprint_steps,
            )

        # From here on a signal means: finish the step, save, and leave.
        stop = []
        for name in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(name, lambda number, _: stop.append(number))
        outcome = train(
            model,
            optimizer,
            data,
            progress,
            config,
            layout,
            ranks,
            reporter=reporter,
            meter=meter,
            fingerprints=fingerprints,
            save=lambda: save_checkpoint(
                run.checkpoints,
                model,
                optimizer,
                progress,
                ranks,
                identity=start.run_identity(config, data),
                keep=config.run.keep_checkpoints,
            ),
            stop_requested=lambda: bool(stop),
        )
        start.finish(outcome, run, progress, ranks, reporter)


if __name__ == "__main__":
    main()
