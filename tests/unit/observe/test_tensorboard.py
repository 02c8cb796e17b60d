"""Event files carry the names and numbers of metrics.jsonl; losing them costs a warning."""

from __future__ import annotations

import io
import json
import sys

import numpy
import pytest
from PIL import Image

from dms_train.observe import heatmap
from dms_train.observe.options import ObserveOptions
from dms_train.observe.sinks import open_sinks
from dms_train.observe.tensorboard_sink import FOLDER, TensorBoardSink

KEPT = ((1.0, 0.25), (0.5, 0.75), (0.125, 0.3))
ROWS = [
    (1, {"tokens": 64, "train/loss": 0.5, "train/cr": 1.25}),
    (2, {"tokens": 128, "train/loss": 0.25, "eval/kept": KEPT, "train/mfu": None}),
]


@pytest.fixture
def accumulator():
    module = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")

    def read(run_dir):
        events = module.EventAccumulator(str(run_dir / FOLDER), size_guidance={"scalars": 0})
        return events.Reload()

    return read


def record(run_dir, rows, resume_step=0):
    options = ObserveOptions(wandb="disabled", tensorboard=True)
    config = {"optim": {"lr": 1e-4}}
    opened = open_sinks(options, run_dir, config, resume_step=resume_step, warn=pytest.fail)
    for step, values in rows:
        for sink in opened:
            sink.log(step, values)
    for sink in opened:
        sink.summary({"eval/kl": 1.0})
        sink.close()


def test_scalars_are_those_of_metrics_jsonl(accumulator, tmp_path):
    record(tmp_path, ROWS)
    events = accumulator(tmp_path)
    written = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    expected: dict[str, list] = {}
    for row in written:
        for name, value in row.items():
            if name != "step" and isinstance(value, int | float):
                expected.setdefault(name, []).append((row["step"], value))
    assert set(events.Tags()["scalars"]) == set(expected)
    for name, points in expected.items():
        found = [[event.step, event.value] for event in events.Scalars(name)]
        numpy.testing.assert_allclose(found, points)
    assert events.Tags()["images"] == ["eval/kept"]


def test_a_table_by_head_is_a_picture_and_a_histogram(accumulator, tmp_path):
    record(tmp_path, ROWS)
    events = accumulator(tmp_path)
    (picture,) = events.Images("eval/kept")
    levels = numpy.asarray(Image.open(io.BytesIO(picture.encoded_image_string)).convert("L"))
    numpy.testing.assert_allclose(levels[6::12, 6::12] / 255, KEPT, atol=1 / 255)
    (histogram,) = events.Histograms("eval/kept_histogram")
    value = histogram.histogram_value
    assert (value.num, value.min, value.max) == (6, 0.125, 1.0)


def test_a_resumed_run_replaces_later_rows(accumulator, tmp_path):
    record(tmp_path, [(step, {"train/loss": float(step)}) for step in range(1, 6)])
    record(tmp_path, [(step, {"train/loss": 10.0 * step}) for step in (4, 5)], resume_step=3)
    found = [(event.step, event.value) for event in accumulator(tmp_path).Scalars("train/loss")]
    assert found == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 40.0), (5, 50.0)]


def test_without_the_package_there_is_one_warning(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    warnings: list[str] = []
    sink = TensorBoardSink(tmp_path, {}, resume_step=0, warn=warnings.append)
    sink.log(1, {"x": 1})
    sink.close()
    (warning,) = warnings
    assert warning.startswith("tensorboard: ")
    assert warning.endswith("no longer recorded there")


def test_a_failing_write_does_not_stop_training(tmp_path):
    class Broken:
        def add_scalar(self, *args):
            raise OSError("disk\nfull")

    warnings: list[str] = []
    sink = TensorBoardSink.__new__(TensorBoardSink)
    sink._warn, sink._writer = warnings.append, Broken()
    sink.log(1, {"x": 1.0})
    sink.log(2, {"x": 1.0})
    sink.close()
    assert warnings == ["tensorboard: OSError: disk full; no longer recorded there"]


def test_numbers_are_not_tables():
    assert not any(map(heatmap.is_by_head, (1.0, "text", (), [1.0], None)))
    assert heatmap.is_by_head(KEPT)
