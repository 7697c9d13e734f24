"""In what runs differ besides their layout, and what then can be said about their curves."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from common.text import printable
from training.checkpoint.folder import DamageError, read_checkpoint_state
from training.checkpoint.resume import NOT_COMPARED, identity
from training.config.schema import ModelSection, flag
from training.run.directory import RunDir

if TYPE_CHECKING:
    from recipes.compare_layouts.report import Run

DATA = (
    "dataset", "dataset_config", "dataset_split", "text_column", "eval_fraction",
    "skip_bad_records",
)  # fmt: skip
TOKENS = "tokens"  # compared by content: what no flag says, as stdlib of another Python
# With another value of one of these, a run is another training, and no deviation means anything.
OF_A_TRAINING = {
    *map(flag, ModelSection.model_fields), *map(flag, DATA), TOKENS,
    "--tokenizer", "--init-from", "--seq-len", "--global-batch-size",
}  # fmt: skip
SHOWN = 4  # differing flags that a table or a legend has room for


def _content(path: Path) -> str | None:
    """What identifies the tokens of a run, from its newest checkpoint; None without one."""
    try:
        checkpoint = RunDir(path).newest_checkpoint()
        return checkpoint and str(read_checkpoint_state(checkpoint)["identity"]["data"])[:12]
    except (OSError, DamageError, KeyError, TypeError):
        return None


def _init_from(command: list[str]) -> str | None:
    """The weights that a command started from, which config.toml does not tell."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--init-from", "--init_from")
    return parser.parse_known_args(list(map(str, command)))[0].init_from


def differing_flags(runs: list["Run"]) -> dict[str, list]:
    """Flags that make the runs different trainings or curves, with each run's value."""
    identities = [identity(run.config) for run in runs]
    values = {flag(k): [i[k] for i in identities] for k in identities[0] if k not in NOT_COMPARED}
    values["--grad-compression"] = [run.config.memory.grad_compression for run in runs]
    values["--init-from"] = [_init_from(run.start["first_command"]) for run in runs]
    values["--steps"] = [run.rows[-1]["step"] for run in runs]
    content = [_content(run.path) for run in runs]
    if None not in content:
        values[TOKENS] = content
    if len(set(content)) > 1 or None in content:
        # Equal tokens are equal data, whatever it was called where a run was trained.
        values |= {flag(key): [getattr(run.config.data, key) for run in runs] for key in DATA}
        values["--tokenizer"] = [run.config.data.tokenizer for run in runs]
    return {name: each for name, each in values.items() if any(value != each[0] for value in each)}


def shown_flags(comparison: dict) -> list[str]:
    """The differing flags that labels and table columns show, the most telling first."""
    names = comparison["differing_flags"]
    return sorted(names, key=lambda name: name not in OF_A_TRAINING)[:SHOWN]


def named(flags: list[str]) -> str:
    """Flags in a sentence, the first few by name."""
    words = ["global batches" if name == "--global-batch-size" else name for name in flags]
    more = f" and {len(words) - SHOWN} more" if len(words) > SHOWN else ""
    return ", ".join(words[:SHOWN]) + more


def _in_words(name: str) -> str:
    return name.removeprefix("--").removesuffix("batch-size").replace("-", " ") + (
        "batch" if name.endswith("batch-size") else ""
    )


def labels(comparison: dict) -> list[str]:
    """A name for each run in the picture: its layout, and its values of the differing flags."""
    entries, names = comparison["layouts"], shown_flags(comparison)
    words = [
        "".join(
            f", {_in_words(name)} {printable(str(comparison['differing_flags'][name][i]))}"
            for name in names
        )
        for i in range(len(entries))
    ]
    short = [entry["layout"] + word for entry, word in zip(entries, words, strict=True)]
    # Without a difference in the flags, the path tells runs of one layout apart.
    full = [entry["label"] + word for entry, word in zip(entries, words, strict=True)]
    texts = [short[i] if short.count(short[i]) == 1 else full[i] for i in range(len(entries))]
    return [
        text if entry["label"] != comparison["reference"] or text == entry["layout"]
        else f"{text} (reference)"
        for entry, text in zip(entries, texts, strict=True)
    ]  # fmt: skip


def statement(comparison: dict) -> str:
    """What the runs are to each other, in words that follow a colon."""
    differing, count = list(comparison["differing_flags"]), len(comparison["layouts"])
    if count == 1:
        return f"one run, {comparison['layouts'][0]['layout']}"
    if not differing:
        return "one training on every layout"
    if differing == ["--global-batch-size"]:
        return "global batches differ, so these are different trainings"
    text = f"the runs differ in {named(differing)}"
    if OF_A_TRAINING & set(differing):
        return f"{text}: different trainings, without deviations"
    return f"{text}; deviations are of the steps that both have" if "--steps" in differing else text


def excess(comparison: dict) -> str | None:
    """Which runs deviate by more than the bound, and from which step on; None if none does."""
    found = []
    for label, entry in zip(labels(comparison), comparison["layouts"], strict=True):
        if steps := [step for step in (entry["above_bound"] or {}).values() if step is not None]:
            found.append(f"{label} (from step {min(steps)})")
    if not found:
        return None
    more = f" and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
    return f"above the bound: {'; '.join(found[:SHOWN])}{more}"
