"""A SLURM cluster of its own on this machine: munged, slurmctld and one slurmd for each node.

The daemons are Debian's (`apt-get install slurmctld slurmd slurm-client munge`); key, sockets,
ports and state are private to one folder. Node names must resolve for torchrun's rendezvous, so one
marked line is added to /etc/hosts and taken out again.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from tests.support import launch

_HOSTS = Path("/etc/hosts")
_PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
_DAEMONS = ("munged", "slurmctld", "slurmd")
_CONF = """\
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
CredType=cred/munge
# how long a requeued job waits before it may start again, two minutes on a real cluster
AuthInfo=socket={folder}/munge.sock,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SwitchType=switch/none
MpiDefault=none
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,bf_interval=2,sched_interval=2
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
# nodes may claim more cores than this machine has
SlurmdParameters=config_overrides
JobRequeue=1
# a job in `urgent` takes the nodes of one in `batch`: SIGTERM, a minute of grace, back to the queue
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
ReturnToService=2
KillWait=5
MinJobAge=600
SlurmctldTimeout=10
SlurmdTimeout=10
MessageTimeout=20
PropagateResourceLimits=NONE
{nodes}
PartitionName=batch Nodes={names} Default=YES MaxTime=INFINITE State=UP PriorityTier=1 \
PreemptMode=REQUEUE GraceTime=60
PartitionName=urgent Nodes={names} MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
"""


def missing() -> str | None:
    """Why there can be no cluster here; None when there can."""
    absent = [name for name in _DAEMONS if shutil.which(name, path=_PATH) is None]
    if absent:
        packages = "slurmctld slurmd slurm-client munge"
        return f"{', '.join(absent)} not installed: apt-get install {packages}"
    return None if os.access(_HOSTS, os.W_OK) else "/etc/hosts cannot be written for node names"


class LocalSlurm:
    """The cluster in `folder`; `start` it, `stop` it in any case."""

    def __init__(self, folder: Path, nodes: int = 2, cpus: int = 8) -> None:
        self.folder = folder
        self.names = [f"dmsnode{i + 1}" for i in range(nodes)]
        self._cpus = cpus
        self._conf = folder / "slurm.conf"
        self._mark = f"# local slurm {folder}"
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    @property
    def environment(self) -> dict[str, str]:
        """Return the environment in which SLURM's commands find this cluster."""
        return {"SLURM_CONF": str(self._conf), "PATH": _PATH}

    def call(self, *words: str) -> str:
        """Output of one of SLURM's commands, which must succeed."""
        done = subprocess.run(
            words,
            env={**os.environ, **self.environment},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, (words, done.stdout, done.stderr)
        return done.stdout

    def start(self) -> None:
        """Start the daemons and wait until every node is idle."""
        self._write()
        with _HOSTS.open("a") as file:
            file.write(f"127.0.0.1 {' '.join(self.names)} {self._mark}\n")
        key, sock = self.folder / "munge.key", self.folder / "munge.sock"
        munge = ["--foreground", "--force", f"--key-file={key}", f"--socket={sock}"]
        munge += [f"--pid-file={self.folder}/munged.pid", f"--seed-file={self.folder}/munge.seed"]
        self._run("munged", *munge, f"--log-file={self.folder}/munged.log")
        _wait(sock.exists, 20, "munged did not start")
        self._run("slurmctld", "-D", "-f", str(self._conf))
        for name in self.names:
            self.start_node(name)
        _wait(self._all_idle, 60, f"nodes are not idle; see {self.folder}/slurmctld.log")

    def start_node(self, name: str) -> None:
        """Bring a node up."""
        self._run("slurmd", "-D", "-N", name, "-f", str(self._conf), name=name)

    def kill_node(self, name: str) -> None:
        """As in a power failure: its daemon and all processes on it end at once."""
        for process in self._processes(name):
            with contextlib.suppress(psutil.Error):
                process.kill()
        self._end(name, kill=True)

    def stop(self) -> None:
        """Cancel all jobs and end everything that was started here."""
        with contextlib.suppress(Exception):
            self.call("scancel", "--full", "--state=RUNNING")
            self.call("scancel", "--state=PENDING")
            _wait(lambda: not self.call("squeue", "--noheader"), 15, "jobs remain")
        for name in [*self.names, "slurmctld"]:
            self._end(name)
        for process in self._processes(None):
            with contextlib.suppress(psutil.Error):
                process.kill()
        self._end("munged")
        rest = [line for line in _HOSTS.read_text().splitlines() if self._mark not in line]
        _HOSTS.write_text("\n".join(rest) + "\n")  # in place: it may be a mount

    def _write(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "state").mkdir(mode=0o700)
        key = self.folder / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(128))
        ports = launch.free_ports(1 + len(self.names))
        host = socket.gethostname().partition(".")[0]
        nodes = "\n".join(
            f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} "
            f"CPUs={self._cpus} RealMemory=100000 State=UNKNOWN"
            for name, port in zip(self.names, ports[1:], strict=True)
        )
        user = psutil.Process().username()
        values = {"host": host, "port": ports[0], "user": user, "folder": self.folder}
        self._conf.write_text(_CONF.format(**values, nodes=nodes, names=",".join(self.names)))
        (self.folder / "cgroup.conf").write_text("CgroupAutomount=no\n")

    def _run(self, *words: str, name: str | None = None) -> None:
        label = name or words[0]
        with (self.folder / f"{label}.out").open("ab") as out:
            self._daemons[label] = subprocess.Popen(
                words,
                env={**os.environ, **self.environment},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )

    def _end(self, name: str, *, kill: bool = False) -> None:
        daemon = self._daemons.pop(name, None)
        if daemon is None:
            return
        if not kill:
            daemon.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                daemon.wait(10)
        daemon.kill()
        daemon.wait()

    def _processes(self, node: str | None) -> Iterator[psutil.Process]:
        """Job processes of this cluster, of one node when named, with the slurmstepd above them."""
        daemons = {daemon.pid for daemon in self._daemons.values()}
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                found = process.environ()
                if found.get("SLURM_CONF") != str(self._conf) or process.pid in daemons:
                    continue
                if node is None:
                    yield process
                elif found.get("SLURMD_NODENAME") == node:
                    parent = process.parent()
                    if parent is not None and parent.name() == "slurmstepd":
                        yield parent
                    yield process

    def _all_idle(self) -> bool:
        done = subprocess.run(
            ["sinfo", "--noheader", "--Node", "--partition=batch", "--format=%t"],
            env={**os.environ, **self.environment},
            capture_output=True,
            text=True,
            check=False,
        )
        return done.stdout.split() == ["idle"] * len(self.names)


def _wait(condition, seconds: float, otherwise: str) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, otherwise
        time.sleep(0.1)
