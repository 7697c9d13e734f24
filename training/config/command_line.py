"""From a command line to a config. Torch-free.

Precedence: flag > ``--model-config`` or ``--init-from`` > recipe.
"""

import argparse
import contextlib
import difflib
import io
import itertools
import json
import os
import re
import sys
import tomllib
from pathlib import Path

import tyro
from pydantic import BaseModel

from common.errors import ConfigError
from common.files import REPO, read_bounded
from common.secrets import has_credentials, is_secret
from common.text import printable
from models.config import RopeScaling
from models.hf_config import read_hf_config
from parallel.launch import read_launch
from training.config.schema import (
    Config,
    LayoutSection,
    MemorySection,
    ModelSection,
    flag,
    unknown_key,
)
from training.config.values import clean_path

# Any of these files shows that there is a tokenizer, if not one that can be read here.
OTHER_FORMATS = ("tokenizer.model", "spiece.model", "vocab.json", "merges.txt", "vocab.txt")
RECIPES = REPO / "recipes"


class Parser(argparse.ArgumentParser):
    """The options of a command other than training; a bad one is a :class:`ConfigError`."""

    def __init__(self, **options):
        super().__init__(
            formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, **options
        )
        self.register("type", Path, path_option)

    def error(self, message: str):
        """Raise ``message`` instead of printing the usage."""
        raise ConfigError(message)


def path_option(text: str) -> Path:
    """A path, as the type of an option of :class:`Parser`."""
    try:
        return clean_path(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def positive(text: str) -> int:
    """A positive whole number, as the type of an option of :class:`Parser`."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return int(text)


def _early_flag(argv: list[str], name: str) -> str | None:
    """Value of a flag that must be known before the others get their defaults."""
    value = None  # as with any flag, the last one counts
    for i, arg in enumerate(argv):
        key, equals, text = arg.partition("=")
        if key.replace("_", "-") == name:
            value = text if equals else "".join(argv[i + 1 : i + 2])
    return value


def _early_path(argv: list[str], name: str) -> Path | None:
    text = _early_flag(argv, name)
    try:
        return text if text is None else clean_path(text)
    except ValueError as error:
        raise ConfigError(f"{name} {error}") from None


def _check_words(argv: list[str]) -> None:
    """Refuse what must not come as far as a report that echoes it.

    Raises:
        ConfigError: for a secret, which is not repeated, or for bytes that are no text.
    """
    for number, word in enumerate(argv, 1):
        name = word.partition("=")[0]
        if re.search(r"[\ud800-\udfff]", word):
            raise ConfigError(f"argument {number} is not UTF-8: {printable(word)}")
        if name.startswith("--") and is_secret(name):
            raise ConfigError(
                f"{printable(name)}: no secret is taken on the command line, where every user of "
                "this machine sees it: export it in the environment, as WANDB_API_KEY or HF_TOKEN"
            )
        if has_credentials(word):
            before = argv[number - 2] if number > 1 else ""
            where = name if "=" in word and name.startswith("--") else before
            raise ConfigError(
                f"{printable(where) if where.startswith('--') else f'argument {number}'} holds a "
                "password, token or key, which ends up in files: give it in the environment or in "
                "~/.netrc"
            )


def _toml_lines(text: str) -> dict[tuple[str, ...], int]:
    """The line of each table and key of a TOML file; tomllib tells it of none."""
    lines: dict[tuple[str, ...], int] = {}
    table: tuple[str, ...] = ()
    for number, line in enumerate(text.splitlines(), 1):
        header = re.match(r"\s*\[+([^\]]+)\]", line)
        key = re.match(r"\s*([\w.\"'-]+)\s*=", line)
        if match := header or key:
            place = tuple(part.strip(" \t\"'") for part in match[1].split("."))
            table = place if header else table
            lines.setdefault(place if header else table + place, number)
    return lines


def _line_of(text: str, location: tuple[str | int, ...]) -> str:
    lines = _toml_lines(text)
    place = tuple(map(str, location))
    while place and place not in lines:
        place = place[:-1]
    return f"line {lines[place]}, " if place else ""


def read_toml(file: Path) -> tuple[str, dict]:
    """Text and tables of a TOML file.

    Raises:
        ConfigError: in words that follow the file's name. OSError: if it cannot be read.
    """
    try:
        text = read_bounded(file, 1 << 20).decode("utf-8-sig")
        return text, tomllib.loads(text)
    except ValueError as error:  # a TOML error, or bytes that are not UTF-8
        raise ConfigError(str(error)) from None
    except RecursionError:
        raise ConfigError("is nested too deeply") from None


def read_recipe(file: Path) -> dict:
    """The tables of a recipe, each of them checked.

    Raises:
        ConfigError: with line, table and key of what is wrong.
        OSError: if the file cannot be read.
    """
    text, tables = read_toml(file)
    for table, values in tables.items():
        try:
            if table in Config.model_fields and Config.model_fields[table].exclude:
                raise ConfigError(unknown_key(Config, (table,)), (table,))
            Config(**{table: values})
        except ConfigError as error:
            # A section speaks of its own keys alone.
            whole = error.location[:1] == (table,) or table not in Config.model_fields
            place = error.location if whole else (table, *error.location)
            within = f"[{'.'.join(map(str, place[:-1]))}] {place[-1]}: " if place[1:] else ""
            raise ConfigError(f"{_line_of(text, place)}{within}{error}") from None
    return tables


def load_recipe(name: str) -> Config:
    """Read ``recipes/<name>.toml``, or the TOML file at that path.

    Raises:
        ConfigError: if there is none, or it holds an unknown key or a bad value.
    """
    shown = printable(name)
    try:
        path = clean_path(name)
    except ValueError as error:
        raise ConfigError(f"--recipe {error}") from None
    file = path if name.endswith(".toml") else RECIPES / f"{name}.toml"
    try:
        return Config(**{**read_recipe(file), "recipe": str(path)})
    except FileNotFoundError:
        names = sorted(p.stem for p in RECIPES.glob("*.toml"))
        near = difflib.get_close_matches(name, names, n=1)
        hint = (
            f"did you mean {near[0]}?"
            if near
            else f"known: {', '.join(names)}, or a path ending in .toml"
        )
        raise ConfigError(f"--recipe {shown}: no such recipe; {hint}") from None
    except OSError as error:
        raise ConfigError(f"--recipe {shown}: {file} cannot be read: {error.strerror}") from None
    except ConfigError as error:
        raise ConfigError(f"--recipe {shown}: {error}") from None


def _load_defaults(argv: list[str], world_size: int, console: bool) -> Config:
    """The recipe that is named, or the config of the run directory that is, or ``debug``.

    A run goes on on any layout. Its first one is a default only where it fits the processes, and
    where the command says nothing else of what is trained: the whole command, given again, means
    its own.
    """
    name, run_dir = _early_flag(argv, "--recipe"), _early_path(argv, "--run-dir")
    if run_dir is None or name is not None:
        return load_recipe(name or "debug")
    file = run_dir / "config.toml"
    try:
        tables = read_recipe(file)
        defaults = Config(**{**tables, "recipe": str(file)})
        if console and tables.get("memory", {}).get("activation_checkpoint") == "selective":
            what = "activation_checkpoint selective is gone: the run goes on with full"
            print(f"{file}: {what}", file=sys.stderr)
    except (FileNotFoundError, NotADirectoryError):
        return load_recipe("debug")
    except (OSError, ConfigError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(
            f"--run-dir {run_dir}: {file}: {reason}; to start without it, name a --recipe"
        ) from None
    layout = defaults.layout
    ranks = layout.tp * layout.pp * layout.cp * layout.dp_replicate
    sections = (getattr(defaults, name) for name in Config.model_fields if name != "run")
    keys = {key for section in sections for key in getattr(type(section), "model_fields", ())}
    stated = {word.partition("=")[0].replace("_", "-").replace("--no-", "--") for word in argv}
    stated |= {"--micro-batch-size"} if "--batch-size" in stated else set()
    if world_size % ranks or stated & set(map(flag, keys - {"steps"})):
        defaults.layout, defaults.memory = LayoutSection(), MemorySection()
        defaults.step.micro_batch_size = None
    return defaults


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


@_registry.primitive_rule
def _path_as_text(info):
    # An empty text is a path to tyro, the current directory; the schema sees the text.
    if info.type is not Path:
        return None
    return tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="PATH",
        instance_from_str=lambda args: args[0],
        is_instance=lambda value: isinstance(value, str | Path),
        str_from_instance=lambda value: [str(value)],
    )


def _take_hf_config(argv: list[str], defaults: Config) -> tuple[str, dict, dict]:
    """Put the model of --model-config or --init-from, if given, over that of the recipe.

    The tokenizer of --init-from goes with its weights: any other one would give other meanings to
    the rows of its embedding.

    Returns:
        The flag that names it, what it states, and what is assumed beyond, by field name.
    """
    source = "--init-from"
    path, model_config = (_early_path(argv, name) for name in (source, "--model-config"))
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
        return source, {}, {}
    try:
        stated, assumed = read_hf_config(path)
        defaults.model = ModelSection(**stated, **assumed)
    except (ValueError, ConfigError) as error:
        where = "" if isinstance(error, ValueError) else f"{path}: "
        raise ConfigError(f"{source} {where}{error}") from None
    # Anything of that name, so that one which cannot be read is refused and not passed over.
    if source == "--init-from" and os.path.lexists(Path(path) / "tokenizer.json"):
        stated["tokenizer"] = defaults.data.tokenizer = str(Path(path))
    return source, stated, assumed


def _note_assumed(source: str, assumed: dict, model: ModelSection) -> None:
    """Say what a config.json leaves open, where no flag states it either."""
    derived = {"num_key_value_heads": model.kv_heads, "head_dim": model.head_size}
    names = [name for name, value in assumed.items() if getattr(model, name) == value]
    values = [f"{name} {derived.get(name, getattr(model, name))}" for name in names]
    if values:
        print(
            f"{source}: assumed {', '.join(values)}, which config.json does not state",
            file=sys.stderr,
        )


def _check_no_tokenizer(source: Path, tokenizer: str, console: bool) -> None:
    """Of the ``--init-from`` ``source`` without tokenizer.json, where no other tokenizer is named.

    Raises:
        ConfigError: if it has a tokenizer, in another format.
    """
    for name in OTHER_FORMATS:
        if os.path.lexists(source / name):
            raise ConfigError(
                f"--init-from {source} has its tokenizer in {name} and not in tokenizer.json: "
                f'write one with transformers, AutoTokenizer.from_pretrained("{source}")'
                '.save_pretrained("DIR"), and name it with --tokenizer DIR'
            )
    if console:
        print(
            f"--init-from {source} holds no tokenizer.json: its weights are trained with "
            f"--tokenizer {tokenizer} of the recipe",
            file=sys.stderr,
        )


def _parse(argv: list[str], defaults: Config, console: bool) -> Config:
    """What tyro makes of the flags; its report of a bad one, a box of many lines, in one line."""
    report = io.StringIO()
    try:
        with contextlib.redirect_stderr(report):
            return tyro.cli(
                Config,
                args=argv,
                default=defaults,
                prog="train_llm.py",
                description="Pretrain a Llama on a mesh of data-, context- and tensor-parallel "
                "ranks. Defaults are those of the chosen recipe.",
                config=(tyro.conf.OmitArgPrefixes,),
                registry=_registry,
                # What is wrong with a flag is caught here, on every rank.
                console_outputs=console or not {"--help", "-h"} & set(argv),
            )
    except SystemExit as leaving:
        if not leaving.code:
            raise
    lines = [line.strip("│ ") for line in report.getvalue().splitlines()]
    said = itertools.takewhile(lambda line: not line.startswith("──"), lines[1:])
    text = " ".join(said)
    if meant := re.search(r"Perhaps you meant:[│\s]*(--[\w-]+)", report.getvalue()):
        text = f"{text}; did you mean {meant[1]}?"
    raise ConfigError(f"{text} (--help lists all flags)")


def parse_flags(argv: list[str], console: bool = True, world_size: int | None = None) -> Config:
    """Turn a command line into a config; nothing is checked yet beyond each value's own range.

    Args:
        console: say which flags override a model directory, and print ``--help``.
        world_size: processes of the run; None: those of this launch.

    Raises:
        ConfigError: for a bad recipe, what is no flag, or a value out of range.
        SystemExit: with 0, for ``--help``.
    """
    _check_words(argv)
    if _early_flag(argv, "--activation-checkpoint") == "selective":
        raise ConfigError("--activation-checkpoint selective is gone: use full, or every-2")
    defaults = _load_defaults(argv, world_size or read_launch().world_size, console)
    if (_early_flag(argv, "--dataset") or defaults.data.dataset) != defaults.data.dataset:
        defaults.data.dataset_config = None  # that of the recipe is one of its own dataset
    source, stated, assumed = _take_hf_config(argv, defaults)
    config = _parse(argv, defaults, console)
    config._warmup_given = _early_flag(argv, "--warmup-steps") is not None
    for key, value in stated.items():
        now = config.data.tokenizer if key == "tokenizer" else getattr(config.model, key)
        now = now.model_dump() if isinstance(now, BaseModel) else now
        if now != value and console:
            print(f"{flag(key)} {now} overrides {value} of {source}", file=sys.stderr)
    if console:
        _note_assumed(source, assumed, config.model)
    if config.init_from and not (stated.get("tokenizer") or _early_flag(argv, "--tokenizer")):
        _check_no_tokenizer(config.init_from, config.data.tokenizer, console)
    return config
