"""The console scripts of this working tree, as files for PATH."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

from tests.support import launch

# A command that a process forks which has imported torch and megatron already.
_FORKED = """#!{python} -IS
import os, sys
sys.path.insert(0, {root!r})
from tests.support.fork_server import Started
words, folder = dict(os.environ), os.getcwd()
started = Started({forks!r}, {target!r}, sys.argv[1:], words, folder, (0, 1, 2))
sys.exit(started.wait())
"""
# `python -u -m MODULE ARGUMENT...` in such a process, which receives the signals of a launcher.
_FORKED_PYTHON = """#!{python} -IS
import os, signal, sys
sys.path.insert(0, {root!r})
from tests.support.fork_server import Started
words, folder = dict(os.environ), os.getcwd()
option, name, *arguments = sys.argv[2:] if sys.argv[1] == '-u' else sys.argv[1:]
assert option == '-m', sys.argv
started = Started({forks!r}, name, arguments, words, folder, (0, 1, 2))
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, lambda number, _: os.kill(started.pid, number))
sys.exit(started.wait())
"""
_PLAIN = """#!{python}
import sys
from {module} import {function}
if __name__ == '__main__':  # not in a process that it spawns
    sys.argv[0] = {name!r}
    sys.exit({function}())
"""


def write_commands(folder: Path, forks: str | None = None) -> Path:
    """One executable for each console script of pyproject.toml, whatever is installed.

    Args:
        folder: Where they are written; it must not exist.
        forks: Address of a `launch.fork_server`, whose forks the commands then are. They start
            at once, but no signal reaches them.
    """
    text = (launch.ROOT / "pyproject.toml").read_text(encoding="utf-8")
    folder.mkdir(parents=True)
    values = {"python": sys.executable, "root": str(launch.ROOT), "forks": forks}
    for name, target in tomllib.loads(text)["project"]["scripts"].items():
        module, _, function = target.partition(":")
        own = {"name": name, "target": target, "module": module, "function": function}
        file = folder / name
        file.write_text((_FORKED if forks else _PLAIN).format(**values, **own))
        file.chmod(0o755)
    return folder


def forked_python(folder: Path) -> str:
    """A Python for launchers and servers; it starts modules in forks that have imported torch.

    SIGTERM and SIGINT reach the fork, which also ends when this Python is killed. Without a server
    of forks it is that of this process.
    """
    forks = launch.fork_server()
    if forks is None:
        return sys.executable
    file = folder / "python"
    values = {"python": sys.executable, "root": str(launch.ROOT), "forks": forks}
    file.write_text(_FORKED_PYTHON.format(**values))
    file.chmod(0o755)
    return str(file)
