"""What can be known to be wrong from the config alone. Torch-free."""

from common.errors import ConfigError
from training.config.schema import Config

# bfloat16 numbers are up to 2**-7 apart: a moment that is multiplied by more than 1 - 2**-8 and
# rounded stays what it was.
MAX_ROUNDED_BETA = 0.99


def check_optimizer(config: Config) -> None:
    """Check what the optimizer and its schedule are told.

    Raises:
        ConfigError: in one line.
    """
    optimizer, stored = config.optimizer, config.optimizer.optimizer_state_dtype
    decay_steps = optimizer.lr_decay_steps or config.step.steps
    # A recipe's warm-up is none that was asked for; load_config warns of it.
    if optimizer.warmup_steps > decay_steps and config.warmup_given:
        raise ConfigError(
            f"--warmup-steps {optimizer.warmup_steps} exceeds the {decay_steps} steps of the "
            "schedule (--lr-decay-steps, or --steps): use fewer warm-up steps or more steps"
        )
    if stored == "float32":
        return
    if optimizer.optimizer == "sgd":
        raise ConfigError(
            f"--optimizer-state-dtype {stored} has no use with --optimizer sgd, which has no "
            "state: leave it out"
        )
    for name, beta in (("--beta1", optimizer.beta1), ("--beta2", optimizer.beta2)):
        if beta > MAX_ROUNDED_BETA:
            raise ConfigError(
                f"{name} {beta:g} with --optimizer-state-dtype {stored}: what a step changes in "
                f"that moment would be rounded away; use {name} {MAX_ROUNDED_BETA} or less, or "
                "--optimizer-state-dtype float32"
            )
