"""What NVML says about the GPUs of a node, and what a preflight concludes from it. Torch-free."""

import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pynvml

from launch.preflight.node import Report, judge_equal, listing

IDLE_MIB, IDLE_PERCENT = 1024, 10  # what a GPU that nobody uses stays below
CLOCK_LEAST = 0.5  # of the maximum, under load; a power cap lowers it to about 0.7
# Other reasons for a clock below the maximum are normal, such as an idle GPU or a power cap.
THROTTLED = {
    pynvml.nvmlClocksEventReasonHwSlowdown: "hardware slowdown",
    pynvml.nvmlClocksEventReasonSwThermalSlowdown: "software thermal slowdown",
    pynvml.nvmlClocksEventReasonHwThermalSlowdown: "hardware thermal slowdown",
    pynvml.nvmlClocksEventReasonHwPowerBrakeSlowdown: "power brake",
}


@dataclass(frozen=True)
class Gpu:
    """One GPU as NVML describes it; None stands for what NVML does not know of this GPU.

    Attributes:
        total, used: memory in MiB. busy: percent of the last second.
        clock, max_clock: of the SMs, in MHz. reasons: bits nvmlClocksEventReason* for the clock.
        ecc: uncorrected memory errors since the driver was loaded.
        pids: of the processes that compute on the GPU.
    """

    index: int
    name: str
    driver: str
    total: int | None
    used: int | None
    busy: int | None
    clock: int | None
    max_clock: int | None
    reasons: int | None
    ecc: int | None
    pids: list[int]


def read_gpus() -> list[Gpu]:
    """The visible GPUs of this node; none where NVML does not answer, as on a node of AMD GPUs."""
    try:
        pynvml.nvmlInit()
        driver = pynvml.nvmlSystemGetDriverVersion()
        return [_read_gpu(handle, driver) for handle in _visible_handles()]
    except pynvml.NVMLError:
        return []


def _visible_handles() -> list[Any]:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else map(str, range(pynvml.nvmlDeviceGetCount()))
    return [
        pynvml.nvmlDeviceGetHandleByIndex(int(name))
        if name.strip().isdecimal()
        else pynvml.nvmlDeviceGetHandleByUUID(name.strip())
        for name in names
    ]


def _read_gpu(handle: Any, driver: str) -> Gpu:
    def ask(question: Callable, *arguments: int) -> Any:
        try:
            return question(handle, *arguments)
        except pynvml.NVMLError:
            return None

    memory = ask(pynvml.nvmlDeviceGetMemoryInfo, pynvml.nvmlMemory_v2)
    rates = ask(pynvml.nvmlDeviceGetUtilizationRates)
    reasons = ask(pynvml.nvmlDeviceGetCurrentClocksEventReasons)
    if reasons is None:  # the name in drivers before 535
        reasons = ask(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons)
    uncorrected = (pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC)
    processes = ask(pynvml.nvmlDeviceGetComputeRunningProcesses) or []
    return Gpu(
        index=pynvml.nvmlDeviceGetIndex(handle),
        name=pynvml.nvmlDeviceGetName(handle),
        driver=driver,
        total=memory and memory.total >> 20,
        used=memory and memory.used >> 20,
        busy=rates and rates.gpu,
        clock=ask(pynvml.nvmlDeviceGetClockInfo, pynvml.NVML_CLOCK_SM),
        max_clock=ask(pynvml.nvmlDeviceGetMaxClockInfo, pynvml.NVML_CLOCK_SM),
        reasons=reasons,
        ecc=ask(pynvml.nvmlDeviceGetTotalEccErrors, *uncorrected),
        pids=[process.pid for process in processes],
    )


def judge_gpus(report: Report, answers: dict[str, dict]) -> bool:
    """Judge idle GPUs.

    Args:
        answers: by node, its ``gpus``, the number that torch sees (``seen``), and of its ``ranks``.

    Returns:
        Whether all ranks have the same kind of device.
    """
    if not any(node["gpus"] or node["seen"] for node in answers.values()):
        report.say("no GPUs: CPU and gloo")
        return True
    models, enough = {}, True
    for name, node in answers.items():
        if node["seen"] < node["ranks"]:
            enough = False
            report.fault(
                f"torch sees {node['seen']} GPUs for {node['ranks']} ranks on {name}, and "
                f"NVML {len(node['gpus'])}: start one rank for each GPU, and check the "
                "driver, CUDA_VISIBLE_DEVICES and that torch is built for CUDA"
            )
        elif not node["gpus"]:
            report.warn(f"NVML does not answer on {name}: its GPUs are not checked")
        for gpu in node["gpus"]:
            at = f"GPU {gpu.index} on {name}"
            models[at] = f"{gpu.name} with {gpu.total} MiB"
            if gpu.pids or (gpu.used or 0) > IDLE_MIB or (gpu.busy or 0) > IDLE_PERCENT:
                by = f", by process {listing([str(pid) for pid in gpu.pids])}" if gpu.pids else ""
                report.fault(
                    f"{at} is not idle: {gpu.used} MiB and {gpu.busy} % in use{by}: end what "
                    "runs there"
                )
            if gpu.ecc:
                report.fault(
                    f"{at} has had {gpu.ecc} uncorrected memory errors: reset it, or leave the "
                    "node out"
                )
    if models:
        judge_equal(report, "the GPU model", models, "use nodes of one kind")
    kinds = ", ".join(f"{n} x {kind}" for kind, n in Counter(models.values()).items())
    report.say(f"GPUs: {kinds or 'not listed'}")
    return enough


def judge_loaded_gpus(report: Report, answers: dict[str, list[Gpu]]) -> None:
    """Judge the GPUs of each node as they were while every GPU multiplied matrices."""
    for name, gpus in answers.items():
        for gpu in gpus:
            at = f"GPU {gpu.index} on {name}"
            why = [text for bit, text in THROTTLED.items() if (gpu.reasons or 0) & bit]
            if why:
                report.fault(
                    f"{at} is throttled at {gpu.clock} of {gpu.max_clock} MHz "
                    f"({', '.join(why)}): check cooling and power, or leave the node out"
                )
            elif gpu.clock and gpu.clock < CLOCK_LEAST * (gpu.max_clock or 0):
                report.warn(
                    f"{at} runs at {gpu.clock} of {gpu.max_clock} MHz under load: check its "
                    "power limit and 'nvidia-smi -q -d CLOCK'"
                )
