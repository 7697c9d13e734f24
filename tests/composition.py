"""What composes, found by asking: every pair of settings goes through the checks of a start of
train_llm.py, whose rules are in parallel/layout.py.

    python -m tests.composition

prints the table of docs/parallelism.md; a test holds the two together.
"""

from common.errors import ConfigError, LayoutError
from parallel.launch import Launch
from training.config.schema import Config
from training.start import check

# Eight processes, eight layers and sizes that every layout below divides: what is refused is the
# combination.
BASE = {
    "layout": {},
    "memory": {},
    "model": {"num_hidden_layers": 8, "num_attention_heads": 16, "vocab_size": 256},
    "step": {"global_batch_size": 64, "seq_len": 256},
    "optimizer": {},
}
# Name in the table: (table of the config, key, value) of each key that it sets.
SETTINGS = {
    "tp": [("layout", "tp", 2)],
    "sp": [("layout", "tp", 2), ("layout", "sequence_parallel", "on")],
    "cp": [("layout", "cp", 2)],
    "pp": [("layout", "pp", 2)],
    "interleaved": [("layout", "pp", 2), ("layout", "pp_schedule", "interleaved")],
    "zbv": [("layout", "pp", 2), ("layout", "pp_schedule", "zbv")],
    "replicas": [("layout", "dp_replicate", 2)],
    "zero 3": [("layout", "zero", 3)],
    "zero 2": [("layout", "zero", 2)],
    "zero 1": [("layout", "zero", 1)],
    "zero 0": [("layout", "zero", 0)],
    "tied": [("model", "tie_word_embeddings", True)],
    "every-2": [("memory", "activation_checkpoint", "every-2")],
    "full": [("memory", "activation_checkpoint", "full")],
    "compile": [("memory", "compile", True)],
    "offload": [("memory", "cpu_offload", True)],
    "chunks": [("memory", "loss_chunks", 4)],
    "prefetch": [("memory", "prefetch", 2)],
    "bf16 state": [("optimizer", "optimizer_state_dtype", "bfloat16")],
    "compression": [("memory", "grad_compression", "bf16")],
}
# As zbv in everything, and left out of the table.
SAME = {"dualpipev": [("layout", "pp", 2), ("layout", "pp_schedule", "dualpipev")]}
# What a setting cannot do without, unless the other one of a pair says otherwise.
NEEDS = {
    "dualpipev": [("layout", "zero", 1)],
    "zbv": [("layout", "zero", 1)],
    "compression": [("layout", "zero", 0)],
}


def refusal(*names: str) -> str | None:
    """Why settings do not go together; None if they do, "" where they contradict each other."""
    values = {table: dict(keys) for table, keys in BASE.items()}
    for name in names:
        for table, key, value in NEEDS.get(name, []):
            values[table][key] = value
    chosen = {}
    for name in names:
        for table, key, value in (SETTINGS | SAME)[name]:
            if chosen.setdefault((table, key), value) != value:
                return ""
            values[table][key] = value
    try:
        check(Config(**values), Launch(0, 8, 0, 8))
    except (LayoutError, ConfigError) as error:
        return str(error)
    return None


def refusals_of(name: str) -> list[str | None]:
    """Refusal of a setting with every setting of the table but the other schedules."""
    others = [other for other in SETTINGS if other not in ("interleaved", "zbv")]
    return [refusal(other, name) for other in others]


def table() -> list[str]:
    """Lines of Markdown: a matrix of pairs, then the reason of each refusal."""
    names, reasons = list(SETTINGS), []
    lines = [f"| | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    for i, row in enumerate(names):
        cells = []
        for column in names[: i + 1]:
            why = refusal(*dict.fromkeys((column, row)))
            if why and why not in reasons:
                reasons.append(why)
            cells.append("yes" if why is None else f"no {reasons.index(why) + 1}" if why else "")
        lines.append(f"| **{row}** | {' | '.join(cells)} |" + " |" * (len(names) - i - 1))
    return [*lines, "", *(f"{n}. {why}" for n, why in enumerate(reasons, start=1))]


if __name__ == "__main__":
    print("\n".join(table()))
