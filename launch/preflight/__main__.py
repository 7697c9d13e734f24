"""Check the nodes of a job before it trains: what is wrong, on which node or rank, and the fix.

    torchrun --nproc-per-node 8 -m launch.preflight --recipe llama3_8b --tp 4
    srun python -m launch.preflight --recipe llama3_8b --tp 4

Started like train_llm.py, on all nodes, with the same flags; it changes nothing in the run
directory. Exit codes: 0 all is well, 1 a fault, 2 bad flags.
"""

import argparse
import os
import sys
import time

from common.errors import ConfigError
from common.output import run_command
from launch.preflight.node import Report, count
from training.config.command_line import Parser, parse_flags, positive
from training.config.schema import Config
from training.start import bare_launch, read_config, refuse

PROGRAM = "launch.preflight"


def parse_command(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Our own options, and the flags of train_llm.py.

    Raises:
        ConfigError: in one line. SystemExit: with 0, for --help.
    """
    parser = Parser(
        prog=f"python -m {PROGRAM}",
        usage="%(prog)s [option ...] [train_llm flag ...]",
        description=__doc__,
        add_help=False,
    )
    add = parser.add_argument
    add("--help", "-h", action="store_true", help="show this and train_llm.py's flags")
    mib_help = "size of the messages that are timed (default: 256 on GPUs, else 4)"
    add("--preflight-mib", type=positive, metavar="MIB", help=mib_help)
    timeout_help = "seconds in which each check must be answered (default: 60)"
    add("--preflight-timeout", type=positive, default=60, metavar="S", help=timeout_help)
    options, flags = parser.parse_known_args(argv)
    if options.help:
        parser.print_help()
        print("\nFlags of train_llm.py:\n")
        parse_flags([*flags, "--help"])
    if any(arg.split("=")[0].replace("_", "-") == "--print-plan" for arg in flags):
        raise ConfigError("--print-plan needs no nodes: leave it out, or run train_llm.py")
    return options, flags


def _parameters(config: Config) -> int:
    """The parameters of the model; an unset vocabulary is the tokenizer's.

    Raises:
        ConfigError: if the tokenizer cannot be loaded.
    """
    from training.data.tokenizer import load_tokenizer

    model = config.model
    if model.vocab_size is None:
        vocabulary = load_tokenizer(config.data.tokenizer).vocab_size
        model = model.model_copy(update={"vocab_size": vocabulary})
    return model.num_parameters


def conclude(report: Report, seconds: float) -> None:
    """Print warnings, faults and the verdict."""
    for sentence in report.warnings:
        report.say(f"WARNING: {sentence}")
    for sentence in report.faults:
        report.say(f"FAULT: {sentence}")
    verdict = count(len(report.faults), "fault") if report.faults else "all is well"
    report.say(f"preflight: {verdict} ({seconds:.0f} s)")


def run(argv: list[str]) -> int:
    """Check the nodes; returns the exit code, the same on all ranks."""
    started = time.monotonic()
    try:
        options, flags = parse_command(argv)
    except ConfigError as error:
        refuse(str(error), bare_launch(), PROGRAM)
    config, layout, launch, _ = read_config(flags, PROGRAM)
    # torch's own lines about a wait that timed out would hide the message of the preflight.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from launch.preflight.checks import Preflight
    from launch.preflight.meeting import EndedError, Meeting, join_store

    report, meeting, timeout, parameters = Report(), None, options.preflight_timeout, 0
    faults = 1
    try:
        if launch.rank == 0:
            parameters = _parameters(config)
        meeting = Meeting(launch, join_store(launch, timeout), timeout)
        mib = options.preflight_mib
        Preflight(meeting, config, layout, parameters, mib, report).examine()
        if launch.rank == 0:
            # Printed before other ranks can end: torchrun ends all ranks with the first that fails.
            conclude(report, time.monotonic() - started)
        faults = meeting.exchange("verdict", digest=lambda _: len(report.faults))
    except ConfigError as error:
        refuse(str(error), launch, PROGRAM)
    except EndedError as error:
        if launch.rank == 0:
            report.fault(str(error))
            conclude(report, time.monotonic() - started)
        elif launch.local_rank == 0 and str(error):
            print(f"{PROGRAM}: {error}", file=sys.stderr)
    if meeting:
        meeting.leave()
    return 1 if faults else 0


def main() -> None:
    """Check the nodes and end this process, even if a thread of it still hangs."""
    code = run(sys.argv[1:])
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


if __name__ == "__main__":
    run_command(main, PROGRAM)
