"""Restart after the loss of a node: steps to repeat, and the work until the first new step.

    python -m benchmarks node_restarts [--nodes 2 4 8] [--save-interval 10]

A node is one `launch/node.sh` here: torchrun with one data-parallel rank of a toy model over gloo.
SIGKILL ends all processes of a node. The others end by themselves; then the same command starts
all nodes again, as a scheduler does. The faults: `before a save`, one step before the second
checkpoint, and `during a save`, while a later checkpoint is written in the background.
`repeated` is the number of steps that the run takes again. `ended` is the time from the fault until
all nodes have ended, and `restart` the time from the second start to its first step. Their unit is
the time from the first start to its first step, but all nodes share the CPUs of this machine, so
the CPU time says more: `CPU, restart` is that of the second start until its first step divided by
that of the first, and `CPU of a node` its share of one node, divided by the value of the first row.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from benchmarks.benchmark import Args, Benchmark
from benchmarks.records import ROOT, Table
from benchmarks.tables import field, table
from dms_train.observe.sinks import METRICS_FILE

_FAULTS = ("before a save", "during a save")
_POLL_SECONDS = 0.01
_PATIENCE_SECONDS = 600.0


class _Run(NamedTuple):
    """A run of several nodes in one folder."""

    nodes: int
    save_interval: int
    inputs: Path
    folder: Path

    def start(self) -> list[subprocess.Popen[bytes]]:
        """Start all nodes."""
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        settings = [
            f"NNODES={self.nodes}",
            "NPROC=1",
            "NODE_NAME=localhost",
            "MASTER_ADDR=localhost",
            f"MASTER_PORT={port}",
            f"RUN={self.folder}",
            f"PYTHON={sys.executable}",
        ]
        script = ROOT / "launch" / "node.sh"
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "log").open("ab") as log:
            return [
                subprocess.Popen(
                    ["env", *settings, "bash", script, "dms_train", *self._words()],
                    stdout=log,
                    stderr=log,
                )
                for _ in range(self.nodes)
            ]

    def _words(self) -> list[str]:
        return [
            "experiment=tiny_pretrain",
            "parallel=single",
            f"model.tokenizer={self.inputs}/tokenizer",
            f"data.paths=[{self.inputs}/train]",
            "data.micro_batch_size=1",
            f"data.global_batch_size={self.nodes}",
            "stage.pretrain.steps=10000",
            "run.eval_samples=0",
            "run.log_interval=1",
            f"run.save_interval={self.save_interval}",
            f"run.dir={self.folder}",
            "observe=quiet",
        ]

    def steps(self) -> list[int]:
        """Return the steps in the file of metrics."""
        file = self.folder / METRICS_FILE
        lines = file.read_text().splitlines() if file.is_file() else []
        rows = [json.loads(line) for line in lines if line.endswith("}")]
        return [row["step"] for row in rows if "train/loss" in row]

    def is_at(self, fault: str) -> bool:
        """Return whether the run is where the fault belongs."""
        if fault == "before a save":
            return max(self.steps(), default=0) >= 2 * self.save_interval - 1
        # the first one is left to complete; a later one may be missed
        written = {path.name for path in (self.folder / "checkpoints").glob("step_*.partial")}
        return bool(written - {f"step_{self.save_interval:08d}.partial"})


def _wait(until: Callable[[], bool], nodes: list[subprocess.Popen[bytes]] | None = None) -> float:
    """Wait for a condition, and return the seconds.

    Raises:
        TimeoutError: It does not come true, or one of `nodes` has ended.
    """
    since = time.monotonic()
    while not until():
        late = time.monotonic() - since > _PATIENCE_SECONDS
        if late or any(node.poll() is not None for node in nodes or ()):
            raise TimeoutError("the nodes did not get there" if late else "a node has ended")
        time.sleep(_POLL_SECONDS)
    return time.monotonic() - since


def _processes(node: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """Return the processes of a node: torchrun puts each rank into a session of its own."""
    with contextlib.suppress(psutil.Error):
        launcher = psutil.Process(node.pid)
        return [launcher, *launcher.children(recursive=True)]
    return []


def _cpu_seconds(nodes: list[subprocess.Popen[bytes]]) -> float:
    """Return the CPU time of all processes of the nodes."""
    total = 0.0
    for process in chain.from_iterable(map(_processes, nodes)):
        with contextlib.suppress(psutil.Error):
            total += sum(process.cpu_times())
    return total


def _kill(nodes: list[subprocess.Popen[bytes]]) -> None:
    for process in chain.from_iterable(map(_processes, nodes)):
        with contextlib.suppress(psutil.Error):
            process.kill()
    for node in nodes:
        node.wait()


def _restart(run: _Run, fault: str) -> dict[str, Any]:
    """Start the run, kill a node, start it again, and measure until its first step."""
    nodes = run.start()
    try:
        first = _wait(lambda: bool(run.steps()), nodes)
        first_cpu = _cpu_seconds(nodes)
        _wait(lambda: run.is_at(fault), nodes)
        _kill(nodes[run.nodes // 2 :][:1])
        ended = _wait(lambda: all(node.poll() is not None for node in nodes))
        finished = max(run.steps())
        (run.folder / METRICS_FILE).rename(run.folder / f"before.{METRICS_FILE}")
        nodes = run.start()
        again = _wait(lambda: bool(run.steps()), nodes)
        cpu = _cpu_seconds(nodes)
        repeated = finished + 1 - min(run.steps())
    except TimeoutError as error:
        *_, last = (run.folder / "log").read_text().splitlines() or ["no output"]
        return {"failed": f"{error}: {last}"}
    finally:
        _kill(nodes)
    return {
        "repeated": repeated,
        "ended": ended / first,
        "restart": again / first,
        "cpu": cpu / first_cpu,
        "cpu_of_a_node": cpu / run.nodes,
    }


def options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    add = parser.add_argument
    add("--nodes", type=int, nargs="+", default=[2, 4, 8], help="(%(default)s)")
    add("--save-interval", type=int, default=10, help="steps (%(default)s)")


def measure(nodes: int, args: Args) -> Iterator[dict[str, Any]]:
    """Yield the measurements of each fault."""
    with tempfile.TemporaryDirectory() as scratch:
        inputs = Path(scratch) / "data"
        words = ["exam-sheets", "--out", str(inputs), "--sheets", "200"]
        command = [sys.executable, "-m", "dms_train.data_prep.prepare", *words]
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        for fault in _FAULTS:
            run = _Run(nodes, args.save_interval, inputs, Path(scratch) / fault.replace(" ", "_"))
            yield {"nodes": nodes, "fault": fault, **_restart(run, fault)}


COLUMNS = (
    ("nodes", field("nodes")),
    ("fault", field("fault")),
    ("repeated", field("repeated")),
    ("ended", field("ended", ".2f")),
    ("restart", field("restart", ".2f")),
    ("CPU, restart", field("cpu", ".2f")),
    ("CPU of a node", field("share", ".2f")),
)


def tables(record: dict[str, Any]) -> str:
    """Return one row for each fault and number of nodes."""
    rows = record["cases"]
    unit = next((row["cpu_of_a_node"] for row in rows if "cpu_of_a_node" in row), 1.0)
    shown = [{**row, "share": row.get("cpu_of_a_node", 0.0) / unit} for row in rows]
    settings = f"run.save_interval={record['save_interval']}"
    return f"{record['versions']}, {settings}\n{table(COLUMNS, shown)}"


BENCHMARK = Benchmark(
    record="node_restarts",
    options=options,
    cases=lambda args: args.nodes,
    settings=lambda args: {"save_interval": args.save_interval},
    measure=measure,
    device=False,
    tables=tables,
    stored=(
        Table(
            "*/node_restarts.json",
            "docs/scale.md",
            (
                "dms_train/launch/node.sh",
                "dms_train/app/session.py",
                "dms_train/training/saving.py",
            ),
        ),
    ),
)
