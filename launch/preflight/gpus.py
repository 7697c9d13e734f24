"""What nvidia-smi says about the GPUs of a node, and what a preflight makes of it. Torch-free."""

import contextlib
import os
import subprocess
from collections import Counter

from launch.preflight.node import Report, judge_equal, listing

# Drivers before 535 call the reasons clocks_throttle_reasons.
GPU_FIELDS = (
    "index", "uuid", "name", "memory.total", "memory.used", "utilization.gpu", "clocks.sm",
    "clocks.max.sm", "clocks_event_reasons.active", "ecc.errors.uncorrected.volatile.total",
    "driver_version",
)  # fmt: skip
IDLE_MIB, IDLE_PERCENT = 1024, 10  # what a GPU that nobody uses stays below
CLOCK_LEAST = 0.5  # of the maximum, under load; a power cap lowers it to about 0.7
# Bits of the reasons (nvmlClocksEventReason*) that say more than "idle" and "power cap".
THROTTLED = {
    0x08: "hardware slowdown", 0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown", 0x80: "power brake",
}  # fmt: skip


def _number(text: str) -> int | None:
    """A number of nvidia-smi; None for its [N/A], [Not Supported] or [Unknown Error]."""
    try:
        return int(text, 0)
    except ValueError:
        return None


def parse_gpus(text: str) -> list[dict]:
    """The rows of ``nvidia-smi --query-gpu=GPU_FIELDS --format=csv,noheader,nounits``.

    Returns:
        By GPU: index, uuid, name, driver; MiB in ``total`` and ``used``; percent in ``busy``; MHz
        in ``clock`` and ``max_clock``; the bits ``reasons``; ``ecc`` errors. None is unknown.
    """
    gpus = []
    for line in text.strip().splitlines():
        values = [value.strip() for value in line.split(",")]
        index, uuid, name, *numbers, driver = values
        names = ("total", "used", "busy", "clock", "max_clock", "reasons", "ecc")
        gpu = dict(zip(names, map(_number, numbers), strict=True))
        gpus.append({"index": index, "uuid": uuid, "name": name, "driver": driver, **gpu})
    return gpus


def parse_processes(text: str) -> dict[str, list[str]]:
    """Ids of processes by GPU, of ``nvidia-smi --query-compute-apps=gpu_uuid,pid``."""
    found: dict[str, list[str]] = {}
    for line in text.strip().splitlines():
        uuid, pid = (value.strip() for value in line.split(","))
        found.setdefault(uuid, []).append(pid)
    return found


def _smi(query: str) -> str:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    chosen = ["-i", visible] if visible else []
    return subprocess.run(
        ["nvidia-smi", *chosen, query, "--format=csv,noheader,nounits"],
        capture_output=True, text=True, check=True, timeout=30,
    ).stdout  # fmt: skip


def query_gpus() -> list[dict]:
    """:func:`parse_gpus` of the visible GPUs of this node, with ``pids``; none without a driver."""
    fields = ",".join(GPU_FIELDS)
    for query in (fields, fields.replace("event_reasons", "throttle_reasons")):
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            gpus = parse_gpus(_smi(f"--query-gpu={query}"))
            pids = parse_processes(_smi("--query-compute-apps=gpu_uuid,pid"))
            return [gpu | {"pids": pids.get(gpu["uuid"], [])} for gpu in gpus]
    return []


def judge_gpus(report: Report, found: dict[str, dict]) -> bool:
    """Judge idle GPUs.

    Args:
        found: by node, ``gpus`` of :func:`query_gpus`, how many torch sees (``seen``), ``ranks``.

    Returns:
        Whether all ranks have the same kind of device.
    """
    if not any(node["gpus"] or node["seen"] for node in found.values()):
        report.say("no GPUs: CPU and gloo")
        return True
    models, enough = {}, True
    for name, node in found.items():
        if node["seen"] < node["ranks"]:
            enough = False
            report.fault(
                f"torch sees {node['seen']} GPUs for {node['ranks']} ranks on {name}, and "
                f"nvidia-smi {len(node['gpus'])}: start one rank for each GPU, and check the "
                "driver, CUDA_VISIBLE_DEVICES and that torch is built for CUDA"
            )
        elif not node["gpus"]:
            report.warn(f"nvidia-smi does not answer on {name}: its GPUs are not checked")
        for gpu in node["gpus"]:
            at = f"GPU {gpu['index']} on {name}"
            models[at] = f"{gpu['name']} with {gpu['total']} MiB"
            if gpu["pids"] or (gpu["used"] or 0) > IDLE_MIB or (gpu["busy"] or 0) > IDLE_PERCENT:
                by = f", by process {listing(gpu['pids'])}" if gpu["pids"] else ""
                report.fault(
                    f"{at} is not idle: {gpu['used']} MiB and {gpu['busy']} % in use{by}: end what "
                    "runs there"
                )
            if gpu["ecc"]:
                report.fault(
                    f"{at} has had {gpu['ecc']} uncorrected memory errors: reset it, or leave the "
                    "node out"
                )
    if models:
        judge_equal(report, "the GPU model", models, "use nodes of one kind")
    kinds = ", ".join(f"{n} x {kind}" for kind, n in Counter(models.values()).items())
    report.say(f"GPUs: {kinds or 'not listed'}")
    return enough


def judge_loaded_gpus(report: Report, found: dict[str, list[dict]]) -> None:
    """Judge :func:`query_gpus` by node, asked while every GPU multiplies matrices."""
    for name, gpus in found.items():
        for gpu in gpus:
            at = f"GPU {gpu['index']} on {name}"
            why = [text for bit, text in THROTTLED.items() if (gpu["reasons"] or 0) & bit]
            if why:
                report.fault(
                    f"{at} is throttled at {gpu['clock']} of {gpu['max_clock']} MHz "
                    f"({', '.join(why)}): check cooling and power, or leave the node out"
                )
            elif gpu["clock"] and gpu["clock"] < CLOCK_LEAST * (gpu["max_clock"] or 0):
                report.warn(
                    f"{at} runs at {gpu['clock']} of {gpu['max_clock']} MHz under load: check its "
                    "power limit and 'nvidia-smi -q -d CLOCK'"
                )
