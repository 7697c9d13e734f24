"""Write the batch script of a training, or submit it. Runs on the login node.

    python -m launch.slurm --nodes 4 --gpus-per-node 8 -- --recipe llama3_8b --tp 4

prints the script, whose flags have been checked for that many processes as train_llm.py checks
them. With --submit it is written to runs/<job name>.sbatch and given to sbatch.
"""

import argparse
import math
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

from pydantic import Field

from common.errors import ConfigError
from common.files import REPO
from common.output import run_command
from common.secrets import has_credentials, is_secret, masked
from launch.preflight.__main__ import parse_command as preflight_command
from parallel.launch import Launch
from parallel.layout import layout_flags, parse_layout
from training.checkpoint.resume import check_resume, find_checkpoint
from training.config.command_line import Parser, parse_flags, positive, read_toml
from training.config.schema import Config, Section
from training.config.values import CleanPath
from training.start import check_ahead

HERE = Path(__file__).parent
SITE = HERE / "site.toml"
EXPORT = (
    "the script is a file that others may read. Export it where you submit (sbatch passes the "
    "environment on), or name the variable alone in --sbatch export=ALL,NAME"
)
HELP = {
    "--nodes": "nodes of a run (default: 1)",
    "--gpus-per-node": "GPUs, and processes, of a node; 0: a cluster without GPUs (default: 8)",
    "--processes-per-node": "processes of a node, if not one per GPU",
    "--layouts": "a job array with one layout per task, and one comparison of them: 1x8 2x4, or "
    "with more dims rep2-dp2-cp2-tp1",
    "--sbatch": "any option of sbatch: --sbatch time=4:00:00 partition=long exclusive=",
    "--site": "this cluster's settings (default: launch/slurm/site.toml, if there is one; "
    "site.example.toml explains it)",
    "--preflight": "check the nodes (launch.preflight) instead of training on them",
    "--submit": "write the script and submit it",
    "--interactive": "write the script and open a shell in an allocation (salloc), from which it "
    "can be started again and again",
}
# An allocation with a shell for a person has no output file and nothing to requeue.
BATCH_ONLY = ("output", "open-mode", "requeue", "signal")


class Site(Section):
    """What differs between clusters; the keys of site.example.toml."""

    sbatch: dict[str, str | int | bool] = Field(default_factory=dict)
    modules: list[str] = Field(default_factory=list)
    activate: CleanPath | None = None
    env: dict[str, str] = Field(default_factory=dict)
    container_image: str | None = None
    container_mounts: list[str] = Field(default_factory=list)


def read_site(path: Path) -> Site:
    """Read a site's settings; all defaults if there is no ``site.toml``.

    Raises:
        ConfigError: in one line, if the file cannot be read or holds an unknown key.
    """
    if path == SITE and not path.exists():
        return Site()
    try:
        site = Site(**read_toml(path)[1])
    except (OSError, ConfigError) as error:
        raise ConfigError(f"--site {path}: {error}") from None
    if site.activate and not (REPO / site.activate).is_file():
        raise ConfigError(f"--site {path}: activate: there is no file {REPO / site.activate}")
    for name, value in site.env.items():
        if not re.fullmatch(r"[A-Za-z_]\w*", name):
            raise ConfigError(f"--site {path}: env: {name!r} is no name of a variable")
        if is_secret(name) or has_credentials(value):
            raise ConfigError(f"--site {path}: env: {name} is a secret: {EXPORT}")
    if has_credentials(site.container_image or ""):
        raise ConfigError(f"--site {path}: container_image holds a password: {EXPORT}")
    site.container_mounts = [os.path.expanduser(mount) for mount in site.container_mounts]
    return site


def _add_options(parser: argparse.ArgumentParser) -> None:
    def add(flag: str, to: argparse._ActionsContainer = parser, **settings) -> None:
        to.add_argument(flag, help=HELP[flag], **settings)

    add("--nodes", type=positive, default=1, metavar="N")
    add("--gpus-per-node", type=int, default=8, metavar="G")
    add("--processes-per-node", type=positive, metavar="P")
    add("--layouts", nargs="+", action="extend", metavar="DPxTP")
    add("--sbatch", nargs="+", action="extend", default=[], metavar="OPTION=VALUE")
    add("--site", type=Path, default=SITE, metavar="FILE")
    add("--preflight", action="store_true")
    submit_or_shell = parser.add_mutually_exclusive_group()
    add("--submit", to=submit_or_shell, action="store_true")
    add("--interactive", to=submit_or_shell, action="store_true")


def parse_command(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Our own options, and after ``--`` the flags of train_llm.py.

    Raises:
        ConfigError: in one line. SystemExit: with 0, for --help.
    """
    parser = Parser(
        prog="python -m launch.slurm",
        usage="%(prog)s [option ...] -- [train_llm flag ...]",
        description=__doc__,
    )
    _add_options(parser)
    split = argv.index("--") if "--" in argv else len(argv)
    options, train_flags = parser.parse_args(argv[:split]), argv[split + 1 :]
    if options.gpus_per_node < 0:
        raise ConfigError(f"--gpus-per-node {options.gpus_per_node} must be 0 or more")
    if options.processes_per_node is None:
        options.processes_per_node = options.gpus_per_node
    if options.processes_per_node < 1:
        raise ConfigError(
            f"--gpus-per-node {options.gpus_per_node} starts no process: give --processes-per-node"
        )
    if options.layouts and options.interactive:
        raise ConfigError("--layouts is a job array: leave out --interactive")
    given = {word.split("=")[0].replace("_", "-") for word in train_flags}
    if "--print-plan" in given:
        raise ConfigError("--print-plan needs no job: run train_llm.py here")
    sizes = set(layout_flags("1x1")[::2]) & given if options.layouts else ()
    if sizes:
        raise ConfigError(f"{min(sizes)} is set for each of --layouts: leave it out")
    return options, train_flags


def own_flags(options: argparse.Namespace, flags: list[str]) -> list[str]:
    """The flags of train_llm.py among ``flags``, which hold preflight's own with --preflight."""
    return preflight_command(flags)[1] if options.preflight else flags


def check_run(options: argparse.Namespace, train_flags: list[str]) -> Config:
    """Check the run, or the run of each layout, as train_llm.py on the nodes would.

    Raises:
        ConfigError: in one line. SystemExit: with 0, for --help.
    """
    per_node = options.processes_per_node
    launch = Launch(0, options.nodes * per_node, 0, per_node)
    if not options.layouts:
        config = parse_flags(train_flags, world_size=launch.world_size)
        check_ahead(config, launch)
        if checkpoint := find_checkpoint(config):
            check_resume(config, checkpoint)
        return config
    if len({tuple(parse_layout(name).values()) for name in options.layouts}) < len(options.layouts):
        raise ConfigError(f"--layouts {' '.join(options.layouts)} has one more than once")
    for name in options.layouts:
        size = math.prod(parse_layout(name).values())
        if size != launch.world_size:
            raise ConfigError(
                f"--layouts {name} has {size} ranks, and --nodes {options.nodes} of {per_node} "
                f"processes are {launch.world_size}"
            )
        config = parse_flags(
            [*train_flags, *layout_flags(name)], console=name == options.layouts[0]
        )
        check_ahead(config, launch)
    return config


def sbatch_options(template: str, options: argparse.Namespace, site: Site, name: str) -> dict:
    """The options of the ``#SBATCH`` lines: the command's, else the site's, else the template's.

    Raises:
        ConfigError: for one that the template must set itself, or without a value.
    """
    lines = [x.removeprefix("#SBATCH --") for x in template.splitlines() if x.startswith("#SBATCH")]
    sbatch = {key: value for key, _, value in (line.partition("=") for line in lines)}
    given = dict(site.sbatch)
    for item in options.sbatch:
        key, equals, value = item.partition("=")
        if not equals:
            raise ConfigError(f"--sbatch {item}: write {key}=VALUE, or {key}= if it has no value")
        given[key] = value
    for key in ("nodes", "ntasks-per-node", "gpus-per-node", "array"):
        if key in given:
            raise ConfigError(
                f"--sbatch {key} is set here: use --nodes, --gpus-per-node or --layouts"
            )
    sbatch |= {"job-name": name, "nodes": options.nodes, "gpus-per-node": options.gpus_per_node}
    if options.layouts:
        sbatch["array"] = f"0-{len(options.layouts) - 1}"
    if not options.gpus_per_node:
        del sbatch["gpus-per-node"]
    sbatch |= {"chdir": REPO} | {k: "" if v is True else v for k, v in given.items()}
    sbatch = {key: str(value) for key, value in sbatch.items() if value is not False}
    if "no-requeue" in sbatch:
        del sbatch["requeue"]
    for key, value in sbatch.items():
        if has_credentials(value):
            raise ConfigError(f"--sbatch {key} holds a secret: {EXPORT}")
        if "\n" in value or not re.fullmatch(r"[a-z][a-z0-9-]*", key):
            raise ConfigError(f"--sbatch {key}={value!r} is no option of sbatch")
    if not sbatch.get("job-name") or "/" in sbatch["job-name"]:
        raise ConfigError(
            f"--sbatch job-name {sbatch.get('job-name')!r} names no file: name another, or another "
            "--run-dir"
        )
    return sbatch


def as_words(options: dict[str, str]) -> list[str]:
    """``--key=value`` each, quoted as both a shell and sbatch read it."""
    return [f"--{k}={shlex.quote(v)}" if v else f"--{k}" for k, v in options.items()]


def environment(options: argparse.Namespace, site: Site) -> list[str]:
    """The shell lines that prepare the environment of the job."""
    lines = [f"module load {shlex.quote(module)}" for module in site.modules]
    if site.activate:
        lines.append("# shellcheck source=/dev/null")
        lines.append(f"source {shlex.quote(str(REPO / site.activate))}")
    if lines:
        # Scripts of sites and of conda read variables that are not set.
        lines = ["set +u", *lines, "set -u"]
    lines += [f"export {key}={shlex.quote(value)}" for key, value in site.env.items()]
    return [*lines, f"export PET_NPROC_PER_NODE={options.processes_per_node}"]


def container(site: Site) -> list[str]:
    """Options of srun for a container of pyxis and enroot, as words of the script."""
    if not site.container_image:
        return []
    mounts = ",".join([f"{REPO}:{REPO}", *site.container_mounts])
    options = {"image": site.container_image, "mounts": mounts, "workdir": REPO}
    return [f'--container-{key}="{value}"' for key, value in options.items()]


def render(
    options: argparse.Namespace, train_flags: list[str], site: Site, run_dir: Path, argv: list[str]
) -> tuple[str, dict[str, str]]:
    """The script, complete in itself, and its options of sbatch.

    Args:
        run_dir: of the run; with ``--layouts``, the directory that holds one for each.
        argv: the command that is noted in the script.
    """
    template = "compare_layouts.sbatch" if options.layouts else "train.sbatch"
    script = (HERE / template).read_text("utf-8")
    name = f"preflight-{run_dir.name}" if options.preflight else run_dir.name
    sbatch = sbatch_options(script, options, site, name)
    body = [line for line in script.splitlines() if not line.startswith("#SBATCH")]
    start = body.index("set -euo pipefail")
    command = masked(shlex.join(["python", "-m", "launch.slurm", *argv])).replace("\n", " ")
    head = ["#!/bin/bash", f"# Written by: {command}"]
    head += [f"#SBATCH {word}" for word in as_words(sbatch)]
    script = "\n".join([*head, *body[start:]]) + "\n"
    shared = (HERE / "run.sh").read_text("utf-8").rstrip()
    if options.preflight:
        before, program, after = shared.partition('train_llm.py "${flags[@]}"')
        assert program, "run.sh starts no training"
        shared = f'{before}-m launch.preflight "${{flags[@]}}"{after}'
    flags, folder = shlex.join(train_flags), shlex.quote(str(run_dir))
    texts = {
        "# site: modules, environment": "\n".join(environment(options, site)),
        "srun_options=()": f"srun_options=({' '.join(container(site))})",
        "source launch/slurm/run.sh": f"\n{shared}",
    }
    if options.layouts:
        each = " ".join(f'"{shlex.join(layout_flags(name))}"' for name in options.layouts)
        texts |= {
            "layouts=(1x8 2x4 4x2 8x1)": f"layouts=({shlex.join(options.layouts)})",
            'layout_flags=("--tp 8" "--tp 4" "--tp 2" "--tp 1")': f"layout_flags=({each})",
            'flags=(--log-every 1 "$@" "${layout[@]}")': f"flags=(--log-every 1 {flags} "
            '"${layout[@]}")',
            "out=runs/$SLURM_JOB_NAME": f"out={folder}",
        }
    else:
        texts |= {
            'flags=("$@")': f"flags=({flags})",
            "run_dir=runs/$SLURM_JOB_NAME": f"run_dir={folder}",
        }
    for line, text in texts.items():
        before, separator, after = script.partition(f"\n{line}\n")
        assert separator, f"the template has no line {line!r}"
        script = f"{before}\n{text}\n{after}"
    return script, sbatch


def main(argv: list[str]) -> int:
    """Run the command; returns its exit code."""
    try:
        options, train_flags = parse_command(argv)
        if not (HERE.parents[1] / "pyproject.toml").is_file():
            raise ConfigError(
                f"this is an installed copy in {HERE.parents[1]}, and a job starts in the "
                "repository: clone it where the nodes see it, and run this there (pip install -e .)"
            )
        if Path.cwd() != REPO:
            raise ConfigError(f"the paths of a run start in the repository: cd {REPO}")
        site = read_site(options.site)
        config = check_run(options, own_flags(options, train_flags))
        run_dir = config.run_dir
        if options.layouts and not config.run.run_dir:
            run_dir = Path("runs") / f"compare-{Path(config.recipe).stem}"
        script, sbatch = render(options, train_flags, site, run_dir, argv)
    except ConfigError as error:
        print(f"launch.slurm: error: {error}", file=sys.stderr)
        return 2
    if not options.submit and not options.interactive:
        print(script, end="")
        return 0
    file = REPO / "runs" / f"{sbatch['job-name']}.sbatch"
    file.parent.mkdir(exist_ok=True)
    file.write_text(script, "utf-8")
    print(f"written: {file}")
    try:
        if options.submit:
            return subprocess.run(["sbatch", str(file)]).returncode
        words = [f"--{k}={v}" if v else f"--{k}" for k, v in sbatch.items() if k not in BATCH_ONLY]
        command = ["salloc", *words, "bash"]
        print(
            f"$ {shlex.join(command)}\nin that shell, as often as you like: bash {file}", flush=True
        )
        os.execvp(command[0], command)
    except FileNotFoundError as error:
        print(f"launch.slurm: error: there is no {error.filename} here", file=sys.stderr)
        return 2


if __name__ == "__main__":
    run_command(lambda: main(sys.argv[1:]), "launch.slurm")
