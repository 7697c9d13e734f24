"""The checks of a preflight in their order: every rank answers each of them, and rank 0 judges."""

import os
import secrets
import shutil
import threading
import time
from dataclasses import asdict, dataclass, field

import torch
import torch.distributed as dist

from launch.preflight import bandwidth, gpus, network, node
from launch.preflight.gpus import Gpu
from launch.preflight.meeting import Meeting
from launch.preflight.node import Report
from parallel.layout import Layout
from parallel.mesh import init_ranks
from training.config.schema import Config

# Fields that rank 0 takes from a checkpoint, which a node at fault may not see.
FROM_CHECKPOINT = {"optimizer": {"lr_decay_steps"}, "model": {"vocab_size"}, "run": {"resume"}}
MIB = {"cpu": 4, "cuda": 256}


@dataclass
class Preflight:
    """All checks of one job.

    Attributes:
        parameters: of the model, counted on rank 0 alone.
        mib: size of a message in MiB; None for the default of the device.
        floor: part of the median below which a speed is a fault.
        measurable: whether the nodes can form a process group, on rank 0.
        parts: speed of each node as a part of the median, on rank 0.
    """

    meeting: Meeting
    config: Config
    layout: Layout
    parameters: int
    mib: int | None
    report: Report
    cuda: bool = field(default_factory=torch.cuda.is_available)
    floor: float = 0.0
    measurable: bool = True
    parts: dict[str, float] = field(default_factory=dict)

    def examine(self) -> None:
        """Go through all checks.

        Raises:
            EndedError: if a rank does not answer.
        """
        masks = self.meeting.find_nodes(sum(1 << core for core in os.sched_getaffinity(0)))
        if self.meeting.launch.rank == 0:
            ranks = node.count(self.layout.world_size, "rank")
            nodes = f"{node.count(len(masks), 'node')} ({node.listing(list(masks))})"
            self.report.say(f"layout {self.layout.name} on {ranks}, {nodes}")
            node.judge_cores(self.report, masks, self.cuda)
        self.check_nodes({name: len(ranks) for name, ranks in masks.items()})
        self.check_run_dir()
        if self.check_speed():
            self.check_bandwidth()

    def check_nodes(self, ranks: dict[str, int]) -> None:
        """Versions, GPUs, limits, names, ports and clocks, asked of one rank of each node.

        Args:
            ranks: how many are on each node, on rank 0.
        """
        meeting, report, listener, answer = self.meeting, self.report, None, None
        if meeting.name:
            listener = network.Listener()
            answer = self._describe_node() | {"listener": listener.describe()}

        def judge(answers: dict[int, dict]) -> dict[str, dict]:
            by_node = meeting.by_node(answers)
            for name, given in by_node.items():
                given["ranks"] = ranks[name]
                given["gpus"] = [Gpu(**gpu) for gpu in given["gpus"]]
            node.judge_versions(report, {n: given["versions"] for n, given in by_node.items()})
            limits = {n: given["limits"] for n, given in by_node.items()}
            node.judge_limits(report, limits, self.layout.world_size, self.cuda)
            self.measurable = gpus.judge_gpus(report, by_node)
            return {name: given["listener"] for name, given in by_node.items()}

        nodes = meeting.exchange("node", answer, judge, leaders=True)
        if meeting.name:
            answer = network.visit_all(meeting.name, nodes, meeting.timeout * 2 / 3)

        def judge_visits(answers: dict[int, dict]) -> None:
            by_node = meeting.by_node(answers)
            faults = {name: given["faults"] for name, given in by_node.items()}
            self.measurable &= network.judge_names(report, nodes, faults)
            clocks = {name: given["clock"] for name, given in by_node.items()}
            network.judge_clocks(report, clocks)

        meeting.exchange("names and ports", answer, judge_visits, leaders=True)
        if listener:
            listener.shutdown()
            listener.server_close()

    def _describe_node(self) -> dict:
        devices = gpus.read_gpus()
        driver = devices[0].driver if devices else "none"
        config = self.config.model_dump_json(exclude=FROM_CHECKPOINT)
        return {
            "versions": node.versions(driver, config),
            "limits": node.limits(),
            "gpus": [asdict(gpu) for gpu in devices],
            "seen": torch.cuda.device_count() if self.cuda else 0,
        }

    def check_run_dir(self) -> None:
        """Whether all nodes see and write the same run directory, and the free space in it."""
        meeting, report, run_dir = self.meeting, self.report, self.config.run_dir
        patience, token, created = meeting.timeout / 4, secrets.token_hex(8), []
        try:
            if meeting.launch.rank == 0:
                fault, created = node.make_probe(run_dir, token)
                if fault:
                    token = None
                    report.fault(
                        f"run directory {run_dir.absolute()} cannot be written on rank 0 "
                        f"({fault}): give the user of the job the right to write, or name another "
                        "--run-dir"
                    )
            token = meeting.exchange("probe", digest=lambda _: token, leaders=True)
            answer = None
            if token and meeting.name:
                answer = node.answer_probe(run_dir, token, meeting.name, patience)

            def judge(answers: dict[int, dict]) -> None:
                if token:
                    by_node = meeting.by_node(answers)
                    node.judge_run_dir(report, run_dir, token, by_node, patience)
                    node.judge_space(report, shutil.disk_usage(run_dir).free, self.parameters)

            meeting.exchange("run directory", answer, judge, leaders=True)
        finally:
            if created:
                node.remove_probe(created)

    def check_speed(self) -> bool:
        """How fast each rank is alone, all at the same time; meanwhile NVML is asked.

        Returns:
            Whether the ranks can go on to measure bandwidths.
        """
        meeting, report, loaded = self.meeting, self.report, []
        device = torch.device("cpu")
        if self.cuda:
            device = torch.device(
                "cuda", min(meeting.launch.local_rank, torch.cuda.device_count() - 1)
            )
        self.floor = bandwidth.FLOOR[device.type]
        meeting.exchange("readiness")

        def look() -> None:
            time.sleep(bandwidth.ROUND_S * 2)
            loaded.extend(asdict(gpu) for gpu in gpus.read_gpus())

        looking = threading.Thread(target=look, daemon=True)
        if self.cuda and meeting.name:
            looking.start()
        speed = bandwidth.local_speed(device)
        if looking.is_alive():
            looking.join()

        def judge(answers: dict[int, list]) -> bool:
            speeds = {rank: answer[0] for rank, answer in answers.items()}
            self.parts = bandwidth.judge_speed(report, speeds, meeting.host, self.floor)
            devices = {
                meeting.host[rank]: [Gpu(**gpu) for gpu in answer[1]]
                for rank, answer in answers.items()
                if answer[1]
            }
            gpus.judge_loaded_gpus(report, devices)
            if not self.measurable:
                report.say("bandwidths: not measured, since the nodes cannot form a process group")
            return self.measurable

        return meeting.exchange("speed", [speed, loaded], judge)

    def check_bandwidth(self) -> None:
        """Bandwidth along each mesh dim and between nodes, in a thread that may hang."""
        meeting, report = self.meeting, self.report
        answer: dict = {"step": 0, "at": "the start of the process group"}
        thread = threading.Thread(target=self._measure, args=(answer,), daemon=True)
        thread.start()
        # Rank 0 must hear of a hang before the exchange takes this rank for gone.
        patience = meeting.timeout * 2 / 3
        step, deadline = 0, time.monotonic() + patience
        while thread.is_alive() and time.monotonic() < deadline:
            thread.join(0.1)
            if answer["step"] != step:
                step, deadline = answer["step"], time.monotonic() + patience

        def judge(answers: dict[int, dict]) -> None:
            judge_progress(report, answers, meeting)
            done = [answer for answer in answers.values() if "mesh" in answer]
            if len(done) < len(answers):
                return
            host, floor = meeting.host, self.floor
            bandwidth.judge_mesh(report, [answer["mesh"] for answer in done], host, floor)
            links = [answer["nodes"] for answer in done]
            for name, part in bandwidth.judge_nodes(report, links, host, floor).items():
                self.parts[name] = min(self.parts[name], part)
            slowest = min(self.parts, key=self.parts.get)
            report.say(f"slowest node: {slowest}, at {self.parts[slowest]:.0%} of the median")

        meeting.exchange("bandwidth", dict(answer), judge)

    def _measure(self, answer: dict) -> None:
        def at(what: str) -> None:
            answer.update(step=answer["step"] + 1, at=what)

        meeting = self.meeting
        try:
            # A store of its own, for a wait of the main thread blocks the other. The timeout of the
            # groups is longer than that of rank 0, whose message comes before their traceback.
            store = meeting.store.clone()
            ranks = init_ranks(meeting.launch, self.layout, 2 * meeting.timeout, store=store)
            mib = self.mib or MIB[ranks.device.type]
            mesh = bandwidth.mesh_speed(ranks, mib, at)
            nodes = bandwidth.node_speed(ranks, list(meeting.leaders.values()), mib, at)
            answer.update(mesh=mesh, nodes=nodes)
            dist.destroy_process_group()
        except Exception as error:
            answer["error"] = (str(error) or repr(error)).splitlines()[0]


def judge_progress(report: Report, answers: dict[int, dict], meeting: Meeting) -> None:
    """Say which ranks did not come to the end of the measurement, and where they are.

    Args:
        answers: by rank, ``step`` and ``at``, with ``mesh`` at the end or ``error`` at a failure.
    """
    failed = [rank for rank, answer in answers.items() if "error" in answer]
    if failed:
        first = min(failed, key=lambda rank: answers[rank]["step"])
        at, error = answers[first]["at"], answers[first]["error"]
        report.fault(f"{meeting.who(failed)} failed in {at}: {error}")
        return
    stuck = {rank: answer["step"] for rank, answer in answers.items() if "mesh" not in answer}
    if not stuck:
        return
    behind = [rank for rank, step in stuck.items() if step == min(stuck.values())]
    at = answers[behind[0]]["at"]
    if len(behind) < len(answers):
        verb = "hangs" if len(behind) == 1 else "hang"
        report.fault(
            f"{meeting.who(behind)} {verb} in {at}, and the others wait: look at the process there "
            "(py-spy dump), and at its GPU (Xid errors in dmesg)"
        )
    else:
        report.fault(
            f"no rank came past {at} in time: a link loses what is sent (set NCCL_DEBUG=INFO, and "
            "check NCCL_SOCKET_IFNAME, NCCL_IB_HCA and GLOO_SOCKET_IFNAME), or it is slow (try "
            "--preflight-mib 16)"
        )
