"""From a command line to a config. Torch-free.

Precedence: flag > ``--model-config`` or ``--init-from`` > recipe.
"""

import argparse
import contextlib
import difflib
import io
import json
import sys
import tomllib
from pathlib import Path

import tyro
from pydantic import BaseModel

from models.config import RopeScaling, read_hf_config
from training.config import Config, ConfigError, ModelSection, flag

RECIPES = Path(__file__).parent.parent / "recipes"


class Parser(argparse.ArgumentParser):
    """The options of a command other than training; a bad one is a :class:`ConfigError`."""

    def __init__(self, **options):
        super().__init__(
            formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, **options
        )

    def error(self, message: str):
        """Raise ``message`` instead of printing the usage."""
        raise ConfigError(message)


def positive(text: str) -> int:
    """A positive whole number, as the type of an option of :class:`Parser`."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return int(text)


def _early_flag(argv: list[str], name: str) -> str | None:
    """Value of a flag that must be known before the others get their defaults."""
    found = None  # as with any flag, the last one counts
    for i, arg in enumerate(argv):
        key, _, value = arg.partition("=")
        if key.replace("_", "-") == name:
            found = value or (argv[i + 1] if i + 1 < len(argv) else None)
    return found


def load_recipe(name: str) -> Config:
    """Read ``recipes/<name>.toml``, or the TOML file at that path.

    Raises:
        ConfigError: if there is none, or it holds an unknown key or a bad value.
    """
    file = Path(name) if name.endswith(".toml") else RECIPES / f"{name}.toml"
    if not file.is_file():
        known = sorted(p.stem for p in RECIPES.glob("*.toml"))
        near = difflib.get_close_matches(name, known, n=1)
        hint = (
            f"did you mean {near[0]}?"
            if near
            else f"known: {', '.join(known)}, or a path ending in .toml"
        )
        raise ConfigError(f"--recipe {name}: no such recipe; {hint}")
    try:
        with file.open("rb") as f:
            table = tomllib.load(f)
    except (OSError, ValueError) as error:  # a TOML error, or bytes that are not UTF-8
        raise ConfigError(f"--recipe {name}: {file}: {error}") from None
    for key, instead in (("config_json", "--model-config"), ("init_from", "--init-from")):
        if key in table:
            raise ConfigError(f"--recipe {name}: unknown key {key!r}: use {instead}")
    try:
        return Config(**{**table, "recipe": name})
    except ConfigError as error:
        raise ConfigError(f"--recipe {name}: {error}") from None


_registry = tyro.constructors.ConstructorRegistry()


@_registry.primitive_rule
def _rope_scaling_from_json(info):
    if info.type != RopeScaling | None:
        return None
    return tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="JSON",
        instance_from_str=lambda args: (
            None if args[0] == "none" else RopeScaling(**json.loads(args[0]))
        ),
        is_instance=lambda value: value is None or isinstance(value, RopeScaling),
        str_from_instance=lambda value: ["none" if value is None else value.model_dump_json()],
    )


def _take_hf_config(argv: list[str], defaults: Config) -> tuple[str, dict]:
    """Put the model of --model-config or --init-from, if given, over that of the recipe.

    The tokenizer of --init-from goes with its weights: any other one would give other meanings to
    the rows of its embedding.

    Returns:
        The flag that names it, and what it states, by field name.
    """
    source = "--init-from"
    path, model_config = (_early_flag(argv, name) for name in (source, "--model-config"))
    if path and model_config:
        raise ConfigError(
            f"--init-from {path} and --model-config {model_config} both state the model: "
            "leave out --model-config"
        )
    if path and not Path(path).is_dir():
        hint = f"; if it is a hub name, first run: hf download {path} --local-dir DIR"
        missing = "is not a directory" if Path(path).exists() else f"there is no such folder{hint}"
        raise ConfigError(f"--init-from {path}: {missing}")
    if not path:
        source, path = "--model-config", model_config
    if not path:
        return source, {}
    try:
        stated = read_hf_config(path)
        defaults.model = ModelSection(**stated)
    except (ValueError, ConfigError) as error:
        where = "" if isinstance(error, ValueError) else f"{path}: "
        raise ConfigError(f"{source} {where}{error}") from None
    if source == "--init-from" and (Path(path) / "tokenizer.json").is_file():
        stated["tokenizer"] = defaults.data.tokenizer = str(Path(path))
    return source, stated


def parse_flags(argv: list[str], console: bool = True) -> Config:
    """Turn a command line into a config; nothing is checked yet beyond each value's own range.

    Raises:
        ConfigError: for a bad recipe or a value out of range.
        SystemExit: from tyro, for ``--help`` (0) and for what it cannot parse (2, and it says so).
    """
    defaults = load_recipe(_early_flag(argv, "--recipe") or "debug")
    if (_early_flag(argv, "--dataset") or defaults.data.dataset) != defaults.data.dataset:
        defaults.data.dataset_config = None  # that of the recipe is one of its own dataset
    source, stated = _take_hf_config(argv, defaults)
    # tyro's console_outputs leaves its report of a bad value on.
    quiet = contextlib.nullcontext() if console else contextlib.redirect_stderr(io.StringIO())
    with quiet:
        config = tyro.cli(
            Config,
            args=argv,
            default=defaults,
            prog="train_llm.py",
            description="Pretrain a Llama on a mesh of data-, context- and tensor-parallel ranks. "
            "Defaults are those of the chosen recipe.",
            config=(tyro.conf.OmitArgPrefixes,),
            registry=_registry,
            console_outputs=console,
        )
    for key, value in stated.items():
        now = config.data.tokenizer if key == "tokenizer" else getattr(config.model, key)
        now = now.model_dump() if isinstance(now, BaseModel) else now
        if now != value and console:
            print(f"{flag(key)} {now} overrides {value} of {source}", file=sys.stderr)
    own = stated.get("tokenizer") or _early_flag(argv, "--tokenizer")
    if config.init_from and console and not own:
        print(
            f"--init-from {config.init_from} holds no tokenizer.json: its weights are trained "
            f"with --tokenizer {config.data.tokenizer} of the recipe",
            file=sys.stderr,
        )
    return config
