"""Calibration: its fits by made-up timings, a real one on four ranks, and what it refuses."""

import contextlib
import io
import json
import os
from dataclasses import fields, replace

import pytest
import torch

from parallel.launch import read_launch
from parallel.layout import Layout
from parallel.mesh import init_ranks
from planner.machine import Constants, load_machine, table_name
from planner.memory import Options
from planner.time import block_seconds
from recipes.plan.__main__ import main
from recipes.plan.calibrate import Calibration
from recipes.plan.fitting import (
    ATTENTION,
    BlockTime,
    Measured,
    Sent,
    Work,
    fit_machine,
    fit_terms,
    measured_machine,
    predictions,
)
from recipes.plan.learn import BOUNDS
from tests.ranks import free_port
from training.config.command_line import load_recipe, parse_flags
from training.start import check, with_vocabulary

TRUE = Constants(
    matmul=0.9,
    half=1.7,
    attention=0.6,
    hbm=0.7,
    link=0.85,
    nic=0.65,
    latency=2e-5,
    host=3e-3,
    overlap=0.6,
)
GROUPS = (("tp", 8, 1), ("dp", 16, 8), ("pp", 2, 64))  # ranks and stride, 8 to a node


def made_up(machine):
    """What would be measured on ``machine`` if its formulas were the truth."""
    model = load_recipe("llama3_8b").model

    layout = Layout(dp=16, tp=8, micro_batch_size=1, micro_batches=1)

    def block(m):
        return block_seconds(model, layout, Options(seq_len=8192), m)[0]

    products = [
        Work(f"{n}", flops, machine.product_seconds(flops))
        for n, flops in enumerate((1e9, 3e9, 1e11, 2e12))
    ]
    attention = [Work("attention", 1e12, ATTENTION * machine.attention_seconds(1e12))]
    sent = [
        Sent(dim, size, ranks, stride, kind, machine.collective_seconds(size, ranks, stride, kind))
        for dim, ranks, stride in GROUPS
        for size in (2**16, 2**20, 2**28)
        for kind in ("all_gather", "reduce_scatter", "all_reduce", "send")
    ]
    computing, transfer = 0.03, 0.02
    return Measured(
        products,
        attention,
        memory=[Work("elementwise", 1e9, machine.memory_seconds(1e9))],
        floors=[machine.constants.host],
        blocks=[BlockTime("block", block, block(machine))],
        sent=sent,
        beside=(computing, transfer, computing + (1 - machine.constants.overlap) * transfer),
    )


def test_fits_recover_known_constants():
    table = load_machine("h100")
    found = made_up(replace(table, constants=TRUE))
    fitted, notes = fit_machine(table, found)
    for name in vars(TRUE):
        assert getattr(fitted.constants, name) == pytest.approx(getattr(TRUE, name), rel=1e-5), name
    assert not any("bound" in note for note in notes)
    for what, seconds, predicted in predictions(found, fitted):
        assert predicted == pytest.approx(seconds, rel=1e-5), what


def test_a_device_that_is_not_in_the_table():
    """Its figures are the best that were measured, and constants are near 1."""
    found = made_up(replace(load_machine("a100-80"), constants=TRUE))
    machine, _ = fit_machine(measured_machine("some-gpu", 30.0, 8, found), found)
    assert (machine.name, machine.node, machine.usable_gib) == ("some-gpu", 8, 30.0)
    parts = machine.constants
    assert 0.9 <= parts.matmul <= 1.1 and 0.9 <= parts.link <= 1.0 and 0.9 <= parts.nic <= 1.0
    for what, seconds, predicted in predictions(found, machine):
        assert predicted == pytest.approx(seconds, rel=0.05), what


def test_without_collectives_their_constants_stay():
    table = load_machine("h100")
    found = replace(made_up(replace(table, constants=TRUE)), sent=[], beside=None)
    fitted, notes = fit_machine(table, found)
    for name in ("link", "nic", "latency", "overlap", "fixed"):
        assert getattr(fitted.constants, name) == getattr(Constants(), name)
    assert "not measured" in notes[0]
    alone = measured_machine("cpu", 30.0, 1, found)
    assert alone.link_gbs == alone.peer_gbs > 0 and alone.nic_gbs > 0


def test_a_disturbed_measurement_moves_no_fit():
    rows = [(float(n), 1.0) for n in (1, 2, 4, 8, 16)]
    seconds = [3 * n + 2 for n, _ in rows]
    seconds[2] *= 20
    assert fit_terms(rows, seconds) == pytest.approx([3, 2], rel=0.02)


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H100 NVL", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA H200", "h200"),
        ("NVIDIA H200 NVL", None),
        ("NVIDIA GH200 480GB", None),
        ("NVIDIA A100-SXM4-40GB", "a100-40"),
        ("NVIDIA A100-SXM4-80GB", "a100-80"),
        ("NVIDIA A100 80GB PCIe", "a100-80"),
        ("NVIDIA B200", "b200"),
        ("AMD Instinct MI300X", "mi300x"),
        ("NVIDIA L4", None),
    ],
)
def test_names_of_the_table(device, name):
    assert table_name(device) == name


def calibrate(argv: list[str], port: int) -> tuple[int, str]:
    """The command in this rank; its exit code and what it printed."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        code = main(["--calibrate", "--recipe", "debug", *argv])
    return code, out.getvalue()


def inside(machine) -> bool:
    """Whether every constant is within the bounds of fits."""
    return all(
        low <= getattr(machine.constants, name) <= high for name, (low, high) in BOUNDS.items()
    )


def test_four_ranks(fresh, tmp_path, capsys):
    """A file is written that the planner plans with; it says what it was measured with."""
    file = tmp_path / "machine.json"
    results = fresh(4).run(calibrate, ["--tp", "2", "--calibration", str(file)], free_port())
    assert {code for code, _ in results} == {0} and not any(text for _, text in results[1:])
    out = results[0][1]
    assert out.endswith(f"written: {file}\n") and "predicted" in out

    machine = load_machine("", file)
    assert machine.name == "cpu" and machine.node == 4 and "4 ranks" in machine.source
    assert machine.dtype == "float32" and machine.compiled is False and inside(machine)
    figures = (getattr(machine, field.name) for field in fields(machine))
    assert all(value > 0 for value in figures if isinstance(value, float))
    written = json.loads(file.read_text())
    assert written["layout"] == "2x2"
    measured = " ".join(row["what"] for row in written["measured"])
    for kind in ("all_gather", "reduce_scatter", "all_reduce"):
        for dim in ("dp (2 ranks)", "tp (2 ranks)", "all (4 ranks)"):
            assert f"{kind} over {dim}, 16 MiB" in measured

    plan = ["--recipe", "debug", "--gpus", "4", "--calibration", str(file)]
    assert main(plan) == 0
    out = capsys.readouterr().out
    assert out.startswith("4 x cpu, 4 to a node") and machine.source in out
    assert "constants of a table" not in out and "measured in" not in out
    assert main([*plan, "--dtype", "bfloat16", "--compile"]) == 0
    out = capsys.readouterr().out
    assert "measured in float32, and this is bfloat16" in out and "measured without" in out
    assert main([*plan, "--gpu", "h100"]) == 2


def measured_groups(argv: list[str], port: int) -> list[tuple]:
    """Dim, kind, ranks and stride of what a calibration sends, in as little time as it can."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    config, launch = with_vocabulary(parse_flags(argv)), read_launch()
    layout = check(config, launch)
    calibration = Calibration(config, layout, init_ranks(launch, layout, 60.0))
    calibration.budget = 0.0
    found = [(x.dim, x.kind, x.ranks, x.stride) for x in calibration.collectives()]
    torch.distributed.destroy_process_group()
    return found


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_every_group_is_measured(fresh):
    """Pairs of neighbours send where there is a pipeline; all ranks have the same list."""
    results = fresh(4).run(measured_groups, ["--pp", "2", "--cp", "2"], free_port())
    assert all(found == results[0] for found in results)
    assert set(results[0]) == {
        (dim, kind, ranks, stride)
        for dim, ranks, stride in (("cp", 2, 1), ("pp", 2, 2), ("all", 4, 1))
        for kind in ("all_gather", "reduce_scatter", "all_reduce", "send")
        if kind != "send" or dim == "pp"
    }


def test_one_process(fresh, tmp_path):
    file = tmp_path / "machine.json"
    ((code, out),) = fresh(1).run(calibrate, ["--calibration", str(file)], free_port())
    assert code == 0 and "collectives: not measured" in out
    assert inside(load_machine("", file))


@pytest.mark.parametrize(
    ("argv", "fault"),
    [
        (["--tp", "3"], "--tp 3 does not divide the 1 processes"),
        (["--learn", "runs/x"], "--calibrate and --learn both write"),
        (["--calibration", "no/such/file"], "--calibration no/such/file cannot be written"),
        (["--calibration", "."], "--calibration . cannot be written"),
        (["--gpu", "h10"], "--gpu h10: not in the table"),
        pytest.param(
            ["--gpu", "h100"],
            "none to measure",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
        ),
    ],
)
def test_refusals(argv, fault, capsys, no_launcher):
    assert main(["--calibrate", *argv]) == 2
    err = capsys.readouterr().err
    assert fault in err and err.count("\n") == 1
    assert not torch.distributed.is_initialized()
