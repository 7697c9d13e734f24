"""Learning-rate schedules: pure functions of the step."""

import math

from training.config.schema import OptimizerSection


def lr_at(config: OptimizerSection, decay_steps: int, step: int) -> float:
    """Learning rate of optimizer step ``step`` (1-based), a pure function of the step.

    Linear warm-up to the peak at step ``warmup_steps``, then the schedule's shape down to
    ``min_lr_ratio`` times the peak at ``decay_steps``, and that minimum ever after.
    """
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    if config.lr_schedule == "constant":
        return config.lr
    first = max(1, config.warmup_steps)  # the first step that may be at the peak
    if config.lr_schedule == "wsd":
        first = max(first, decay_steps - max(1, decay_steps // 5))
    done = min(1.0, max(0.0, (step - first) / max(1, decay_steps - first)))
    shape = 0.5 * (1 + math.cos(math.pi * done)) if config.lr_schedule == "cosine" else 1 - done
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * shape)
