"""In what runs differ besides their layout, and what then can be said about their curves."""

import argparse
from pathlib import Path

from common.text import printable
from recipes.compare_layouts.results import Run
from training.checkpoint.folder import DamageError, read_checkpoint_state
from training.checkpoint.resume import NOT_COMPARED, identity
from training.config.schema import ModelSection, flag
from training.run.directory import RunDir

DATA = ("dataset", "dataset_config", "dataset_split", "text_column", "eval_fraction")
DATA += ("skip_bad_records",)
TOKENS = "tokens"  # compared by content: what no flag says, as stdlib of another Python
# With another value of one of these, a run is another training, and no deviation means anything.
OF_A_TRAINING = {flag(key) for key in (*ModelSection.model_fields, *DATA)}
OF_A_TRAINING |= {TOKENS, "--tokenizer", "--init-from", "--seq-len", "--global-batch-size"}
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


def differing_flags(runs: list[Run]) -> dict[str, list]:
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
        # Equal tokens are equal data, whatever the flags were where a run was trained.
        values |= {flag(key): [getattr(run.config.data, key) for run in runs] for key in DATA}
        values["--tokenizer"] = [run.config.data.tokenizer for run in runs]
    return {name: each for name, each in values.items() if any(value != each[0] for value in each)}


def shown_flags(comparison: dict) -> list[str]:
    """The differing flags that labels and table columns show, the most telling first."""
    names = comparison["differing_flags"]
    return sorted(names, key=lambda name: name not in OF_A_TRAINING)[:SHOWN]


def _few(words: list[str], separator: str) -> str:
    more = f" and {len(words) - SHOWN} more" if len(words) > SHOWN else ""
    return separator.join(words[:SHOWN]) + more


def named(flags: list[str]) -> str:
    """Flags in a sentence, the first few by name."""
    words = ["global batches" if name == "--global-batch-size" else name for name in flags]
    return _few(words, ", ")


def _in_words(name: str) -> str:
    if name.endswith("batch-size"):
        name = name.removesuffix("-size")
    return name.removeprefix("--").replace("-", " ")


def labels(comparison: dict) -> list[str]:
    """A name for each run in the picture: its layout, and its values of the differing flags."""
    entries = comparison["layouts"]
    suffixes = [""] * len(entries)
    for name in shown_flags(comparison):
        for i, value in enumerate(comparison["differing_flags"][name]):
            suffixes[i] += f", {_in_words(name)} {printable(str(value))}"
    short = [entry["layout"] + suffixes[i] for i, entry in enumerate(entries)]
    texts = []
    for entry, text, suffix in zip(entries, short, suffixes, strict=True):
        if short.count(text) > 1:
            # Without a difference in the flags, the path tells runs of one layout apart.
            text = entry["label"] + suffix
        if entry["label"] == comparison["reference"] and text != entry["layout"]:
            text += " (reference)"
        texts.append(text)
    return texts


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
    runs = []
    for label, entry in zip(labels(comparison), comparison["layouts"], strict=True):
        if steps := [step for step in (entry["above_bound"] or {}).values() if step is not None]:
            runs.append(f"{label} (from step {min(steps)})")
    return f"above the bound: {_few(runs, '; ')}" if runs else None
