"""What a machine can do: the table of GPUs, and the constants that a calibration replaces."""

import json
import math
import re
import tomllib
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from common.errors import ConfigError
from common.files import read_json, write_atomic

TABLE = Path(__file__).with_name("gpus.toml")


@dataclass(frozen=True)
class Constants:
    """The parts of the table's figures that are reached; a calibration fits these alone.

    The defaults are between those that fit published runs of five trainers (docs/planning.md).

    Attributes:
        matmul: part of the best matrix product.
        half: of the table's size of a matrix product that reaches half of that, as a factor.
        attention: part of the best matrix product, on causal FLOPs.
        hbm: part of the memory's bandwidth, in what is elementwise.
        link, nic: parts of the bandwidths within a node and between nodes.
        latency: seconds of a collective within a node; between nodes two for each root of them.
        host: seconds in which the host queues forward and backward of a block without compilation;
            a compiled one is taken as a ninth. Of eager PyTorch on H100 hosts, published.
        overlap: part of the computing under which FSDP's transfers hide.
        fixed: seconds of a step beside all that: clipping, logging.
    """

    matmul: float = 0.92
    half: float = 1.4
    attention: float = 0.38
    hbm: float = 0.6
    link: float = 0.75
    nic: float = 0.7
    latency: float = 15e-6
    host: float = 4.4e-3
    overlap: float = 0.75
    fixed: float = 15e-3


@dataclass(frozen=True)
class Machine:
    """A GPU, its node and network, as ``planner/gpus.toml`` describes them.

    Attributes:
        source: where the constants come from; None is the table.
        compiled: whether they were measured with compiled blocks; None where it is not known.
        dtype: compute dtype in which they were measured; None where it is not known.
        learnt: whether they were fitted to steps of training.
    """

    name: str
    usable_gib: float
    peak_tflops: float
    matmul_tflops: float
    half_gflop: float
    hbm_tbs: float
    link_gbs: float
    peer_gbs: float
    nic_gbs: float
    node: int
    constants: Constants = Constants()
    source: str | None = None
    compiled: bool | None = None
    dtype: str | None = None
    learnt: bool = False

    def product_seconds(self, flops: float, times: int = 1) -> float:
        """Of ``times`` matrix products of so many FLOPs each."""
        rate = self.constants.matmul * self.matmul_tflops * 1e12
        return times * (flops + self.constants.half * self.half_gflop * 1e9) / rate

    def attention_seconds(self, flops: float) -> float:
        """Of the products of attention, whose FLOPs are those of the causal half."""
        return flops / (self.constants.attention * self.matmul_tflops * 1e12)

    def memory_seconds(self, size: float) -> float:
        """To read or write so many bytes of memory."""
        return size / (self.constants.hbm * self.hbm_tbs * 1e12)

    def collective_seconds(
        self, size: float, ranks: int, stride: int, kind: str, world: int | None = None
    ) -> float:
        """Of a collective over ``ranks`` that are ``stride`` apart; ``size`` bytes are the whole.

        Ring algorithms: every rank sends (n - 1) / n of the whole, an all-reduce twice that. Ranks
        of a group that share a node each drive a NIC of their own.

        Args:
            world: number of all ranks, which may be fewer than a node has; None for many.
        """
        if ranks == 1:
            return 0.0
        c = self.constants
        here = ranks_on_a_node(ranks, stride, min(self.node, world or self.node))
        speed = c.link * min(self.link_gbs, self.peer_gbs * (here - 1)) if here > 1 else math.inf
        latency, nodes = c.latency, -(-ranks // here)
        if nodes > 1:
            speed = min(speed, here * c.nic * self.nic_gbs)
            latency += 2 * c.latency * math.sqrt(nodes)
        part = 1.0 if kind in ("send", "recv") else (ranks - 1) / ranks
        return (2 if kind == "all_reduce" else 1) * (part * size / (speed * 1e9) + latency)


def ranks_on_a_node(ranks: int, stride: int, node: int) -> int:
    """How many ranks of a group share a node of ``node`` ranks, wherever the group begins: where
    groups do not line up with nodes, some lie on two."""
    return max(1, math.gcd(node, ranks * stride) // stride)


def _table() -> dict[str, dict]:
    return tomllib.loads(TABLE.read_text())


def _plannable(entry: dict) -> bool:
    """Whether an entry of the table has more than a peak."""
    return "matmul_tflops" in entry


def known_gpus() -> list[str]:
    """The names in the table for which a plan can be made."""
    return [name for name, entry in _table().items() if _plannable(entry)]


def _entry_name(device: str, table: dict[str, dict]) -> str | None:
    """The entry with the most words of ``device``, as whole words: an RTX A1000 is not an A100."""
    words = set(re.findall(r"[a-z0-9]+", device.lower()))
    if "mig" in words:
        return None
    sizes = {name: entry["device"].lower().split() for name, entry in table.items()}
    names = [name for name in table if words.issuperset(sizes[name])]
    return max(names, key=lambda name: len(sizes[name]), default=None)


def table_name(device: str) -> str | None:
    """The name in the table of a GPU that calls itself ``device``; None for one that no plan can be
    made for, or a part of one (MIG)."""
    table = _table()
    name = _entry_name(device, table)
    return name if name and _plannable(table[name]) else None


def peak_flops(device_name: str, dtype: str) -> float | None:
    """Peak FLOP/s of a device of ``torch.cuda.get_device_name``; None for one that is not in the
    table, for a part of one (MIG), and for any dtype but bfloat16."""
    table = _table()
    name = _entry_name(device_name, table) if dtype == "bfloat16" else None
    return table[name]["peak_tflops"] * 1e12 if name else None


def load_machine(gpu: str, calibration: Path | None = None, **changes: float) -> Machine:
    """A GPU of the table, with the constants of a calibration file if one is given.

    Args:
        changes: fields that are not as in the table, such as ``nic_gbs``.

    Raises:
        ConfigError: if the table does not have the GPU, or only its peak, or the file cannot be
            read or is of another one.
    """
    if calibration:
        return Machine(**vars(_read_calibration(calibration, gpu)) | changes)
    entry = _table().get(gpu)
    if not entry:
        raise ConfigError(f"--gpu {gpu}: not in the table; known: {', '.join(known_gpus())}")
    if not _plannable(entry):
        raise ConfigError(
            f"--gpu {gpu}: the table has only its peak: use --calibrate on one, without --gpu"
        )
    return Machine(name=gpu, **{k: v for k, v in entry.items() if k != "device"} | changes)


def _read_calibration(file: Path, gpu: str) -> Machine:
    try:
        values = read_json(file, 1 << 20)
        constants = Constants(**values.pop("constants"))
        names = {field.name for field in fields(Machine)} & values.keys()
        machine = Machine(**{name: values[name] for name in names}, constants=constants)
        _check_numbers(machine)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(
            f"--calibration {file}: cannot be read ({error}): measure it anew"
        ) from None
    if gpu and machine.name != gpu:
        raise ConfigError(
            f"--calibration {file} is of {machine.name}, and --gpu is {gpu}: leave out one of them"
        )
    return machine


def _check_numbers(machine: Machine) -> None:
    for owner in (machine, machine.constants):
        for field in fields(owner):
            value = getattr(owner, field.name)
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if field.type in (int, float) and not (number and 0 < value < math.inf):
                raise ValueError(f"{field.name} is {value!r}, not a number above 0")
    if machine.node != int(machine.node):
        raise ValueError(f"node is {machine.node}, not a whole number")


def write_calibration(file: Path, machine: Machine, **about) -> None:
    """Write a machine, and what is said ``about`` its measurement, for :func:`load_machine`.

    Raises:
        ConfigError: if the file cannot be written.
    """
    try:
        write_atomic(file, json.dumps({**asdict(machine), **about}, indent=1) + "\n")
    except OSError as error:
        raise ConfigError(f"--calibration {file} cannot be written: {error.strerror}") from None
