"""Loss of a node: time until all ranks have ended, by the number of nodes.

    python -m benchmarks node_faults [--nodes 4 8 16 32] [--ranks-per-node 8] [--patience 8]

A node is one process here, with its own host name. It runs the heartbeats of its ranks, as the
ranks of a run do, and its main thread takes steps in which all nodes wait for each other. The
faults: `killed` (SIGKILL of a node), `stopped` (SIGSTOP), and `no data` (no read returns on any
node). `first` and `last` are the times after the fault at which the first node reports it and the
last one ends, in units of the patience, which is half of the timeout of a collective.
`check` is the mean CPU time of a check of a rank, and `last check` the sum over the ranks of the
CPU time of the check that ended them. All nodes share the CPUs of this machine.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.benchmark import Args, Benchmark
from benchmarks.records import Table
from benchmarks.tables import field, table
from dms_train.observe.heartbeats import Heartbeats, Phase

_FORK = multiprocessing.get_context("fork")
_FAULTS = ("killed", "stopped", "no data")
_STEP_SECONDS = 0.2
_CALM = 1.0  # patiences before the fault
_LIMIT = 10.0  # patiences after it


class _TimedHeartbeats(Heartbeats):
    """Heartbeats that record the CPU seconds of each check that has not ended the rank."""

    since: float
    seconds: list[float]

    def check(self) -> bool:
        self.since = time.thread_time()
        ended = super().check()
        self.seconds.append(time.thread_time() - self.since)
        return ended


class _Case(NamedTuple):
    """One fault in a number of nodes."""

    nodes: int
    ranks_per_node: int
    patience: float
    fault: str
    folder: Path

    @property
    def ranks(self) -> int:
        """Number of ranks of all nodes."""
        return self.nodes * self.ranks_per_node

    @property
    def victim(self) -> int:
        """The node that is killed or stopped."""
        return self.nodes // 2


class _Node:
    """Process of one node: the heartbeats of its ranks, and steps of its main thread."""

    def __init__(self, case: _Case, node: int) -> None:
        socket.gethostname = lambda: f"node{node}"  # the ranks of another node are not visible here
        self._case, self._node = case, node
        self._lock, self._ends = threading.Lock(), list[dict[str, Any]]()
        first = node * case.ranks_per_node
        self._ranks = [self._heartbeats(first + n) for n in range(case.ranks_per_node)]

    def _heartbeats(self, rank: int) -> _TimedHeartbeats:
        case = self._case
        folder = case.folder / "ranks"
        heartbeats = _TimedHeartbeats(
            folder, rank, case.ranks, case.patience, lambda reason: self._end(heartbeats, reason)
        )
        heartbeats.seconds = []
        return heartbeats

    def run(self, meet: Any, data: Any) -> None:
        """Take steps until the fault; `data` is cleared when no read returns any more."""
        meet.wait()
        for rank in self._ranks:
            rank.start()
        for step in range(1_000_000):
            phase: Phase = "step" if data.is_set() else "data"
            with contextlib.ExitStack() as phases:
                for rank in self._ranks:
                    phases.enter_context(rank.phase(phase))
                if phase == "data":
                    threading.Event().wait()
                time.sleep(_STEP_SECONDS)
                meet.wait()
            for rank in self._ranks:
                rank.reached(step)

    def _end(self, rank: _TimedHeartbeats, reason: str | None) -> None:
        """Record the end of a rank; the last one ends the process."""
        last = time.thread_time() - rank.since
        with self._lock:
            self._ends.append({"time": time.time(), "reason": reason, "last": last})
            if len(self._ends) == len(self._ranks):
                usual = [seconds for rank in self._ranks for seconds in rank.seconds]
                report = json.dumps({"ends": self._ends, "usual": usual})
                (self._case.folder / f"end{self._node}").write_text(report)
                os._exit(0)


def _detection(case: _Case) -> dict[str, Any]:
    """Start the nodes, cause the fault, and measure until all other nodes have ended."""
    (case.folder / "ranks").mkdir(parents=True)
    meet, data = _FORK.Barrier(case.nodes), _FORK.Event()
    data.set()
    nodes = [
        _FORK.Process(target=lambda n=n: _Node(case, n).run(meet, data)) for n in range(case.nodes)
    ]
    for node in nodes:
        node.start()
    time.sleep(_CALM * case.patience)
    since = time.time()
    if case.fault == "no data":
        data.clear()
    else:
        sent = signal.SIGKILL if case.fault == "killed" else signal.SIGSTOP
        os.kill(nodes[case.victim].pid or 0, sent)
    for number, node in enumerate(nodes):
        if case.fault == "no data" or number != case.victim:
            node.join(max(0, since + _LIMIT * case.patience - time.time()))
    for node in nodes:
        node.kill()
        node.join()
    return _summary(case, since)


def _summary(case: _Case, since: float) -> dict[str, Any]:
    """Read what the nodes recorded at their ends."""
    nodes = [json.loads(file.read_text()) for file in case.folder.glob("end*")]
    lost = case.fault != "no data"
    if len(nodes) != case.nodes - lost:
        return {"failed": f"{len(nodes)} of {case.nodes - lost} nodes have ended"}
    ends = sorted((end for node in nodes for end in node["ends"]), key=lambda end: end["time"])
    reasons = [end["reason"] for end in ends if end["reason"] is not None]
    first = case.victim * case.ranks_per_node
    named = [f"rank {rank} (" for rank in range(first, first + case.ranks_per_node)]
    if lost and not all(name in reasons[0] for name in named):
        return {"failed": f"the lost ranks are not named: {reasons[0]}"}
    usual = [seconds for node in nodes for seconds in node["usual"]]
    return {
        "first": (ends[0]["time"] - since) / case.patience,
        "last": (ends[-1]["time"] - since) / case.patience,
        "check_ms": 1e3 * sum(usual) / len(usual),
        "last_check_ms": 1e3 * sum(end["last"] for end in ends),
    }


def options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    add = parser.add_argument
    add("--nodes", type=int, nargs="+", default=[4, 8, 16, 32], help="(%(default)s)")
    add("--ranks-per-node", type=int, default=8, help="(%(default)s)")
    add("--patience", type=float, default=8.0, help="seconds (%(default)s)")


def measure(nodes: int, args: Args) -> Iterator[dict[str, Any]]:
    """Yield the measurements of each fault."""
    with tempfile.TemporaryDirectory() as scratch:
        for fault in _FAULTS:
            folder = Path(scratch) / fault
            case = _Case(nodes, args.ranks_per_node, args.patience, fault, folder)
            yield {"nodes": nodes, "ranks": case.ranks, "fault": fault, **_detection(case)}


COLUMNS = (
    ("nodes", field("nodes")),
    ("ranks", field("ranks")),
    ("fault", field("fault")),
    ("first, patiences", field("first", ".2f")),
    ("last, patiences", field("last", ".2f")),
    ("check, CPU ms", field("check_ms", ".2f")),
    ("last check, CPU ms", field("last_check_ms", ".0f")),
)


def tables(record: dict[str, Any]) -> str:
    """Return one row for each fault and number of nodes."""
    return f"{record['versions']}, patience {record['patience']:g} s\n" + table(
        COLUMNS, record["cases"]
    )


BENCHMARK = Benchmark(
    record="node_faults",
    options=options,
    cases=lambda args: args.nodes,
    settings=lambda args: {"patience": args.patience},
    measure=measure,
    device=False,
    tables=tables,
    stored=(Table("*/node_faults.json", "docs/scale.md", ("dms_train/observe/heartbeats.py",)),),
)
