"""One package and a preset add a retrofit method; the guide's own files are tried."""

from __future__ import annotations

import json
import os
import re

from tests.support import launch
from tests.unit.export.test_add_a_format import copied_package

GUIDE = launch.ROOT / "docs" / "guides" / "add_method.md"
USE = """
import json
import math
import sys
import torch
from dms_train import LLM, SamplingParams
from dms_train.cli.config_source import compose
from dms_train.export.writer import write_export
from dms_train.hf.formats import default_format, read_format, read_spec
from dms_train.mcore import groups
from dms_train.mcore.engine import McoreEngine, TrainEngineOptions
from dms_train.mcore.options import OptimOptions, ParallelOptions
from dms_train.method.plan import LearningRate, StepPlan
from dms_train.method.spec import PRESETS
from tests.support import tiny

assert compose(["experiment=tiny_retrofit", "method=keyed"]).method.kind == "keyed"
method = PRESETS["keyed"].override(window=4, alpha_offset=0.5)
a = tiny.architecture("llama", num_layers=2)
view = groups.start(ParallelOptions(), seed=1)
options = TrainEngineOptions(parallel=ParallelOptions(), optim=OptimOptions(lr=1e-3), seed=7)
weights = tiny.SmallKeyChannels(a, 1, method.channel)
engine = McoreEngine(a, method, view, options, weights)
engine.attach_teacher(None)
rate = {"max_lr": 1e-3, "min_lr": 1e-3, "steps": 2, "warmup_steps": 0, "style": "constant"}
engine.begin_stage(LearningRate(**rate))
before = dict(engine.hf_tensors())
losses = []
for step in range(2):
    plan = StepPlan(step=step, stage_step=step, eviction="soft", channel_scale=0.0, target_cr=4.0)
    losses.append(engine.train_step(plan, [tiny.batch(step)]).loss)
after = dict(engine.hf_tensors())
recording = engine.record(StepPlan(channel_scale=0.0, eviction="hard"), tiny.batch(5, 1).tokens[0])
write_export(
    sys.argv[1],
    architecture=a,
    spec=method.spec,
    cr_factor=None,
    target_cr=4.0,
    dtype=torch.float32,
    export_format=default_format(method.spec),
    weights=after.items(),
    source_dir=None,
    selftest=None,
    provenance={},
)
assert read_spec(sys.argv[1]) == method.spec
prompt = recording.input_ids.tolist()
first = LLM(sys.argv[1]).generate(prompt, SamplingParams(max_tokens=1, temperature=0.0))[0]
print(json.dumps({
    "finite": all(map(math.isfinite, losses)),
    "changed": sum(not torch.equal(before[name], after[name]) for name in before),
    "evicts": (recording.decision_logits > 0).double().mean().item(),
    "format": read_format(sys.argv[1]),
    "engine": first.outputs[0].token_ids[0],
    "trained": recording.logits[-1].argmax().item(),
}))
"""


def files() -> dict[str, str]:
    """The guide's files by path: each path is the last one that is named before a block."""
    found, path = {}, ""
    for part in re.split(r"^(```(?:python|yaml)\n.*?^```)", GUIDE.read_text(), flags=re.M | re.S):
        if part.startswith(("```python", "```yaml")):
            found[path] = part.partition("\n")[2].removesuffix("```")
        else:
            named = re.findall(r"`((?:dms_train|conf)/[\w/]*(?:keyed)[\w/]*\.\w+)`", part)
            path = named[-1] if named else ""
    return found


def test_the_guides_files_add_a_method(tmp_path):
    package, added = copied_package(tmp_path), files()
    assert set(added) == {
        "dms_train/method/keyed/spec.py",
        "dms_train/method/keyed/attention.py",
        "conf/method/keyed.yaml",
        "dms_train/inference/policies/keyed.py",
    }
    (package / "method" / "keyed").mkdir()
    (package / "method" / "keyed" / "__init__.py").write_text('"""Keys decide."""\n')
    for path, text in added.items():
        (package / path.removeprefix("dms_train/")).write_text(text)
    done = launch.python(
        "-c",
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n" + USE,
        str(tmp_path / "export"),
        PYTHONSAFEPATH="1",
        PYTHONPATH=os.pathsep.join([str(tmp_path), str(launch.ROOT)]),
    )
    found = json.loads(launch.checked(done).splitlines()[-1])
    assert found["finite"]
    assert found["changed"] > 0
    assert 0.1 < found["evicts"] < 0.9
    assert found["format"] == "keyed"
    assert found["engine"] == found["trained"]
    config = json.loads((tmp_path / "export" / "config.json").read_text())
    assert config["model_type"] == "keyed_llama"
    assert "auto_map" not in config
    assert not list((tmp_path / "export").glob("*.py"))
