"""Sinks of metrics: `metrics.jsonl`, and others if configured. One rank owns them.

`metrics.jsonl` is the durable record: every row is on disk before the next step.
Weights & Biases is a view of this record. None of its failures may stop the training.
Names are the same everywhere. A value is a number or a table [layers][KV heads] of shares. The
views show a table as a picture and a histogram.
"""

from __future__ import annotations

import json
import math
import os
import re
import secrets
import socket
import threading
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, Protocol

from dms_train.observe import heatmap
from dms_train.observe.log import logger
from dms_train.observe.options import ObserveOptions
from dms_train.observe.tensorboard_sink import TensorBoardSink

METRICS_FILE = "metrics.jsonl"
SUMMARY_FILE = "summary.json"
RUN_ID_FILE = "wandb_id"
STEP, TOKENS = "step", "tokens"
VALIDATION = "validate_export/"
# Curves over steps, and over the number of training tokens.
_BY_STEP = ("train/*", "branch/*", "early_stop/*", f"{VALIDATION}*", "run_tasks/*")
_AXES = {**dict.fromkeys(_BY_STEP, STEP), "eval/*": TOKENS}
_PROBE_SECONDS = 3.0
_FINISH_SECONDS = 60.0

Warn = Callable[[str], None]
Mode = Literal["online", "offline"]


class Sink(Protocol):
    """Receiver of plain numbers from the owning rank."""

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Record one row of the global step `step`."""

    def summary(self, values: Mapping[str, Any]) -> None:
        """Record final or best values of the whole run; later calls add to earlier ones."""

    def close(self) -> None:
        """Close the sink; it must not be used afterwards."""


def open_sinks(
    options: ObserveOptions,
    run_dir: Path,
    config: Mapping[str, Any],
    *,
    resume_step: int,
    warn: Warn,
) -> list[Sink]:
    """Open the sinks of a run.

    Args:
        options: The sinks to open.
        run_dir: Run folder; all files are written below it.
        config: The resolved configuration, shown beside the metrics.
        resume_step: Last finished step of the checkpoint that the run resumes; 0 for a new run.
        warn: Called with one line when a view cannot be opened as configured.
    """
    sinks: list[Sink] = [JsonlSink(run_dir, resume_step=resume_step, warn=warn)]
    if options.wandb != "disabled":
        run_id = wandb_run_id(run_dir, resumed=resume_step > 0)
        sinks.append(WandbSink(options, run_dir, config, run_id=run_id, warn=warn))
    if options.tensorboard:
        sinks.append(TensorBoardSink(run_dir, config, resume_step=resume_step, warn=warn))
    return sinks


class JsonlSink:
    """Sink of `metrics.jsonl`, one object a row, and `summary.json`; NaN and inf become null.

    On a full disk rows wait in memory for free space, after one warning; training continues.
    """

    def __init__(self, run_dir: Path, *, resume_step: int = 0, warn: Warn | None = None) -> None:
        run_dir.mkdir(parents=True, exist_ok=True)
        self._path = run_dir / METRICS_FILE
        self._summary_path = run_dir / SUMMARY_FILE
        self._summary: dict[str, Any] = {}
        self._warn = warn or logger().warning
        self._waiting, self._warned = b"", False
        _drop_rows_past(self._path, resume_step)
        self._file = self._path.open("ab", buffering=0)

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Append a row; it is in the file when this returns, unless the disk is full."""
        self._waiting += json.dumps({STEP: step, **_finite(values)}).encode() + b"\n"
        self._attempt(self._append)

    def summary(self, values: Mapping[str, Any]) -> None:
        """Rewrite `summary.json` with the added values."""
        self._summary.update(_finite(values))
        text = json.dumps(self._summary, indent=2) + "\n"
        self._attempt(lambda: _replace(self._summary_path, text))

    def close(self) -> None:
        """Close the file."""
        self._attempt(self._append)
        if self._waiting:
            self._warn(f"{self._path}: its last rows could not be written")
        self._file.close()

    def _append(self) -> None:
        while self._waiting:
            with _named_errors(self._path):
                written = self._file.write(self._waiting)
            self._waiting = self._waiting[written:]

    def _attempt(self, action: Callable[[], object]) -> None:
        try:
            action()
            self._warned = False
        except OSError as error:
            if not self._warned:
                self._warn(f"{error.filename}: {error.strerror}; its rows wait for free space")
            self._warned = True


class WandbSink:
    """Weights & Biases. Every failure is one warning; after one in `log` the sink records nothing.

    The run folder holds the run id, so a resumed run continues the same id. Offline it adds a
    segment, and `wandb sync` joins the segments. For repeated steps, Weights & Biases keeps the
    first rows and `metrics.jsonl` the new ones.
    """

    def __init__(
        self,
        options: ObserveOptions,
        run_dir: Path,
        config: Mapping[str, Any],
        *,
        run_id: str,
        warn: Warn,
    ) -> None:
        self._warn = warn
        self._run: Any = None
        self._attempt(lambda: self._open(options, run_dir, config, run_id))

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Pass a row to the background process of Weights & Biases."""
        if self._run is not None:
            self._attempt(lambda: self._run.log(self._row(step, values), step=step))

    def summary(self, values: Mapping[str, Any]) -> None:
        """Set summary values."""
        if self._run is not None:
            self._attempt(lambda: self._run.summary.update(dict(values)))

    def close(self) -> None:
        """Finish the run, waiting for a bounded time."""
        run, self._run = self._run, None
        if run is None:
            return
        finisher = threading.Thread(target=self._attempt, args=(run.finish,), daemon=True)
        finisher.start()
        finisher.join(_FINISH_SECONDS)
        if finisher.is_alive():
            self._warn("wandb: did not finish in time; the run folder holds what is missing")

    def _row(self, step: int, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return numbers unchanged and tables by head as media; add one table for a validation."""
        wandb, row = self._wandb, {STEP: step, **values}
        for name, value in values.items():
            if heatmap.is_by_head(value):
                row[name] = wandb.Image(heatmap.pixels(value), caption="layer down, KV head right")
                flat = [share for shares in value for share in shares]
                row[f"{name}_histogram"] = wandb.Histogram(flat)
        evaluated = [[n.removeprefix(VALIDATION), v] for n, v in values.items() if VALIDATION in n]
        if evaluated:
            row[f"{VALIDATION}table"] = wandb.Table(columns=["metric", "value"], data=evaluated)
        return row

    def _open(
        self, options: ObserveOptions, run_dir: Path, config: Mapping[str, Any], run_id: str
    ) -> None:
        import wandb

        self._wandb = wandb

        def init(mode: Mode) -> Any:
            return wandb.init(
                project=options.project,
                entity=options.entity,
                name=options.name or run_dir.resolve().name,
                id=run_id,
                resume="allow",
                dir=str(run_dir),
                config=dict(config),
                mode=mode,
                settings=_settings(wandb),
            )

        mode = self._mode(options, wandb)
        try:
            self._run = init(mode)
        except wandb.errors.Error as error:
            if mode == "offline":
                raise
            self._warn(f"wandb: {_one_line(error)}; recording offline")
            wandb.teardown()  # its background process still holds the run id
            self._run = init("offline")
        for axis in (STEP, TOKENS):
            self._run.define_metric(axis)
        for names, axis in _AXES.items():
            self._run.define_metric(names, step_metric=axis)

    def _mode(self, options: ObserveOptions, wandb: Any) -> Mode:
        """Choose `online` only if a server answers and a key is set; nothing prompts or hangs."""
        if options.wandb != "online":
            return "offline"
        url = wandb.setup().settings.base_url
        if not reachable(url):
            self._warn(f"wandb: {_public(url)} cannot be reached; recording offline")
            return "offline"
        if not wandb.login(prompt=False, verify=False):
            self._warn(f"wandb: no API key for {_public(url)} (`wandb login`); recording offline")
            return "offline"
        return "online"

    def _attempt(self, action: Callable[[], object]) -> None:
        """Suppress any error inside the block, because training continues without a sink."""
        try:
            action()
        except Exception as error:
            self._run = None
            self._warn(f"wandb: {_one_line(error)}; no longer recorded there")


def wandb_run_id(run_dir: Path, *, resumed: bool) -> str:
    """Return the stored id of a resumed run folder, else a new one."""
    file = run_dir / RUN_ID_FILE
    if resumed and file.is_file():
        return file.read_text(encoding="utf-8").strip()
    run_id = secrets.token_hex(4)
    run_dir.mkdir(parents=True, exist_ok=True)
    _replace(file, run_id + "\n")
    return run_id


def reachable(url: str) -> bool:
    """Return whether a TCP connection to a server, or to its proxy, opens quickly."""
    target = urllib.parse.urlsplit(url)
    proxy = urllib.request.getproxies().get(target.scheme)
    if proxy and not urllib.request.proxy_bypass(target.hostname or ""):
        target = urllib.parse.urlsplit(proxy if "//" in proxy else f"//{proxy}")
    port = target.port or (443 if target.scheme == "https" else 80)
    try:
        with socket.create_connection((target.hostname or "", port), timeout=_PROBE_SECONDS):
            return True
    except OSError:
        return False


def _settings(wandb: Any) -> Any:
    """Return settings with short timeouts that record nothing about the machine or its code."""
    return wandb.Settings(
        init_timeout=10,
        login_timeout=1,
        finish_timeout=_FINISH_SECONDS - 10,
        console="off",
        silent=True,
        disable_git=True,
        disable_code=True,
        x_disable_meta=True,
        x_disable_stats=True,
        x_graphql_retry_max=1,
        x_graphql_timeout_seconds=5,
    )


def _drop_rows_past(path: Path, step: int) -> None:
    """Drop the rows of steps that a resumed run repeats, and a truncated last row."""
    if not path.is_file():
        return
    kept = [line for line in path.read_text(encoding="utf-8").splitlines() if _keeps(line, step)]
    _replace(path, "".join(line + "\n" for line in kept))


def _keeps(line: str, step: int) -> bool:
    try:
        row = json.loads(line)
    except json.JSONDecodeError:
        return False
    return isinstance(row, dict) and step > 0 and row.get(STEP, step + 1) <= step


def _replace(path: Path, text: str) -> None:
    scratch = path.with_suffix(path.suffix + ".tmp")
    with _named_errors(path):
        scratch.write_text(text, encoding="utf-8")
        os.replace(scratch, path)


@contextmanager
def _named_errors(path: Path) -> Iterator[None]:
    """Add the file name to a write error; the error of a full disk has none."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def _finite(values: Mapping[str, Any]) -> dict[str, Any]:
    bad = {k for k, v in values.items() if isinstance(v, float) and not math.isfinite(v)}
    return {key: None if key in bad else value for key, value in values.items()}


def _one_line(error: BaseException) -> str:
    return _public(f"{type(error).__name__}: {' '.join(str(error).split())}")[:200]


def _public(text: str) -> str:
    """Remove the user and password of addresses from `text`."""
    return re.sub(r"(?<=://)[^/@\s]*@", "", text)
