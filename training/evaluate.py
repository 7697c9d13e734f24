"""The loss over held-out documents."""

import torch
import torch.distributed as dist

from parallel.context_parallel import local_tokens
from parallel.data_parallel import reshard
from training.config.schema import Config
from training.data.batches import IGNORE_INDEX, TokenData, eval_batches, num_eval_batches
from training.step import Engine, batch_loss


@torch.no_grad()
def evaluate(engine: Engine, data: TokenData, config: Config) -> dict:
    """Mean loss per token over the held-out sequences, each counted once; same on every layout.

    Returns:
        ``eval_loss`` in nats per token and ``eval_tokens``, the number of targets.
    """
    layout, ranks = engine.layout, engine.ranks
    total = torch.zeros(2, dtype=torch.float64, device=ranks.device)
    sizes = {
        "global_batch_size": config.step.global_batch_size,
        "max_batches": config.data.eval_batches,
    }
    batches = [[]] * num_eval_batches(data.eval, **sizes)
    if ranks.pp_rank in layout.data_pp_ranks:
        batches = eval_batches(
            data.eval,
            dp_rank=ranks.dp_rank,
            dp=layout.data_ranks,
            micro_batch_size=layout.micro_batch_size,
            **sizes,
        )
    for batch in batches:
        batch = [
            tuple(local_tokens(x, ranks.cp, ranks.cp_rank).to(ranks.device) for x in pair)
            for pair in batch
        ]
        if engine.pipeline:
            total[0] += engine.pipeline.forward(batch)
        else:
            total[0] += sum(batch_loss(engine.model, *pair, ranks) for pair in batch)
        total[1] += sum((targets != IGNORE_INDEX).sum() for _, targets in batch)
    reshard(engine.model)
    if ranks.tp_rank != 0:
        total.zero_()
    if ranks.pp_rank != 0:
        total[1] = 0
    dist.all_reduce(total)
    loss, tokens = total.tolist()
    return {"eval_loss": loss / max(tokens, 1), "eval_tokens": int(tokens)}
