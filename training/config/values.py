"""The values of a run: what a number, a text, a path or a duration may be. Torch-free."""

import os
import re
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field

from common.secrets import has_credentials
from models.config import PositiveFloat
from parallel.options import checkpoint_every

# What the numbers of a run are multiplied with each other must fit in 64 bits.
Ranks = Annotated[int, Field(gt=0, le=2**17)]
Sequences = Annotated[int, Field(gt=0, le=2**24)]
Tokens = Annotated[int, Field(gt=0, le=2**27)]
Steps = Annotated[int, Field(gt=0, le=10**12)]
NonNegativeInt = Annotated[int, Field(ge=0, le=10**12)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Beta = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)]

LONGEST_NAME, LONGEST_PATH = 255, 3500  # bytes; a path leaves room for what a run writes in it
LONGEST_DURATION = 365 * 24 * 3600


def clean_text(text: Any) -> Any:
    """Check a text that is a name or a place; of another type, pydantic says that it is one.

    Raises:
        ValueError: if it is empty, cannot be written in a file, or holds a secret.
    """
    if not isinstance(text, str):
        return text
    if not text:
        raise ValueError("must not be empty: leave it out, or give a value")
    if "\0" in text:
        raise ValueError("must not hold a NUL character")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("must be UTF-8: rename it") from None
    if has_credentials(text):
        raise ValueError(
            "must not hold a password, token or key, which ends up in files: "
            "give it in the environment or in ~/.netrc"
        )
    return text


def clean_place(text: Any) -> Any:
    """A name or a path: as :func:`clean_text`, with ``~`` expanded, and short enough for a file.

    Raises:
        ValueError: in words that follow the flag.
    """
    text = clean_text(text)
    if not isinstance(text, str):
        return text
    if text.startswith("~"):
        text = os.path.expanduser(text)
        if text.startswith("~"):
            raise ValueError("names the home directory of nobody here")
    longest = max(len(os.fsencode(part)) for part in text.split("/"))
    if longest > LONGEST_NAME:
        raise ValueError(
            f"has a name of {longest} bytes between its slashes, and file systems take "
            f"{LONGEST_NAME}: shorten it"
        )
    if (size := len(os.fsencode(text))) > LONGEST_PATH:
        raise ValueError(f"has {size} bytes, and a path may have {LONGEST_PATH}: shorten it")
    return text


def clean_path(path: Any) -> Any:
    """The path that a text stands for.

    Raises:
        ValueError: as :func:`clean_place`.
    """
    path = clean_place(str(path) if isinstance(path, Path) else path)
    return Path(path) if isinstance(path, str) else path


Text = Annotated[str, BeforeValidator(clean_text)]
Place = Annotated[str, BeforeValidator(clean_place)]
CleanPath = Annotated[Path, BeforeValidator(clean_path)]


def seconds(duration: str) -> float:
    """Seconds of a duration such as ``3h50m``, ``90m`` or ``1d12h``.

    Raises:
        ValueError: if it is none, zero, or more than a year. A bare number is none: Slurm's
            would be minutes.
    """
    match = re.fullmatch("".join(rf"(?:(\d{{1,9}}){unit})?" for unit in "dhms"), duration)
    days, hours, minutes, rest = (int(part or 0) for part in match.groups()) if match else [0] * 4
    total = ((days * 24 + hours) * 60 + minutes) * 60 + rest
    if not 0 < total <= LONGEST_DURATION:
        raise ValueError(
            f"must be a duration such as 3h50m, 90m or 45s, of at most 365d, not {duration!r}"
        )
    return float(total)


def _checked_duration(duration: str) -> str:
    seconds(duration)
    return duration


Duration = Annotated[str, AfterValidator(_checked_duration)]


def step_range(steps: str) -> tuple[int, int]:
    """First and last of steps such as ``10-12``, or ``10`` alone.

    Raises:
        ValueError: if they are none.
    """
    match = re.fullmatch(r"(\d{1,12})(?:-(\d{1,12}))?", steps)
    first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= first <= last:
        raise ValueError(f"must be steps such as 10-12 or 10, not {steps!r}")
    return first, last


def _checked_step_range(steps: str) -> str:
    step_range(steps)
    return steps


def _checked_timeout(timeout: float) -> float:
    if not 1 <= timeout <= 30 * 24 * 3600:
        raise ValueError(f"must be from 1 to 2592000 seconds (30 days), not {timeout}")
    return timeout


Timeout = Annotated[PositiveFloat, AfterValidator(_checked_timeout)]
StepRange = Annotated[str, AfterValidator(_checked_step_range)]


def _checked_checkpointing(mode: str) -> str:
    checkpoint_every(mode)
    return mode


Checkpointing = Annotated[str, AfterValidator(_checked_checkpointing)]


def older_checkpointing(values: Any) -> Any:
    """The memory section of an older run: ``selective`` is ``full``."""
    if isinstance(values, dict) and values.get("activation_checkpoint") == "selective":
        return {**values, "activation_checkpoint": "full"}
    return values


def older_batch_size(values: Any) -> Any:
    """The step section of an older run or recipe: ``batch_size`` is ``micro_batch_size``.

    Raises:
        ValueError: if both are there.
    """
    if not isinstance(values, dict) or "batch_size" not in values:
        return values
    if "micro_batch_size" in values:
        raise ValueError("batch_size is the older name of micro_batch_size: leave one of them out")
    values = dict(values)
    return values | {"micro_batch_size": values.pop("batch_size")}


def whole(number: Any) -> Any:
    """Refuse what Python, but nobody else, takes for a whole number."""
    if isinstance(number, bool | float):
        raise ValueError(f"must be a whole number, not {number!r}")
    return number
