"""dms-verify and dms-inspect on real folders."""

from __future__ import annotations

import json

import pytest
import torch

from dms_train.app.verification import verify as replay
from dms_train.checkpoints_tools import inspect_folder as inspect
from dms_train.checkpoints_tools import verify
from dms_train.hf.selftest import SelfTest


@pytest.fixture
def tested_export(export, architecture, random_weights, reference_forward):
    """(family, spec, move=False, dtype="float32") -> export with a self-test.

    `move` misplaces one eviction channel row.
    """

    def _export(family, s, *, move=False, dtype="float32"):
        a = architecture(family)
        weights = {name: tensor.bfloat16() for name, tensor in random_weights(a).items()}
        ids = torch.randint(0, a.vocab_size, (72,), generator=torch.Generator().manual_seed(3))
        logits, decisions = reference_forward(weights, a, s, ids)
        reference = SelfTest(
            input_ids=ids,
            decision_logits=decisions.float(),
            logits=logits.float(),
            dtype=dtype,
        )
        if move:
            rows = weights["model.layers.1.self_attn.q_proj.weight"]
            eviction_channel = (
                s.channel % a.kv_channels
            )  # group 0; exchanged with its second query head
            other = eviction_channel + a.kv_channels
            rows[[eviction_channel, other]] = rows[[other, eviction_channel]]
        return export(
            family,
            s,
            weights=weights.items(),
            dtype=torch.bfloat16,
            selftest=reference,
            cr_factor=1.7,
        )

    return _export


CASES = [("llama", "dms"), ("qwen3", "dms_nvidia"), ("llama", "dms_fastdms")]


@pytest.mark.parametrize(("family", "preset"), CASES)
def test_verify_passes(tested_export, spec, capsys, family, preset):
    directory = tested_export(family, spec(preset))
    assert verify.main([str(directory)]) == 0
    assert "PASS" in capsys.readouterr().out


@pytest.mark.parametrize(("family", "preset"), CASES)
def test_verify_finds_a_moved_row(tested_export, spec, capsys, family, preset):
    directory = tested_export(family, spec(preset), move=True)
    assert verify.main([str(directory)]) == 1
    assert "FAIL: the export is not the trained model" in capsys.readouterr().out


def test_verify_finds_a_cache_that_evicts_other_tokens(tested_export, spec, capsys):
    """Logits without a cache are right, those of `generate` are not."""
    directory = tested_export("llama", spec("dms", window=8))
    # a new name, because Python has already imported the code of `export`
    directory = directory.rename(directory.parent / "other_code")
    code = directory / "modeling_dms.py"
    tokens = "tokens = (key, value, decisions)"
    assert code.read_text().count(tokens) == 1
    other = tokens.replace("decisions", "torch.zeros_like(decisions)")
    code.write_text(code.read_text().replace(tokens, other))
    # the cache is compared although the directory turns it off
    (directory / "generation_config.json").write_text('{"use_cache": false}')
    assert verify.main([str(directory)]) == 1
    assert "generate() computes something else" in capsys.readouterr().out
    found = replay(directory)
    assert found.kl_per_token < 1e-6
    assert found.generated_kl_per_token > found.kl_tolerance


def test_verify_in_bfloat16(tested_export, spec, capsys):
    s = spec("dms", window=8)
    assert verify.main([str(tested_export("llama", s, dtype="bfloat16"))]) == 0
    assert verify.main([str(tested_export("llama", s, dtype="bfloat16", move=True))]) == 1
    assert capsys.readouterr().out.count("nats/token") == 2


def test_verify_adds_no_rounding_of_its_own(tested_export, spec):
    """The stored logits are those of float32, although the reference names bfloat16."""
    directory = tested_export("llama", spec("dms", window=8), dtype="bfloat16")
    assert replay(directory).logit_difference < 1e-4
    assert replay(directory).generated_kl_per_token < 1e-6
    assert replay(directory, dtype="bfloat16").logit_difference > 1e-3


def test_verify_notes_a_short_test(tested_export, spec, capsys):
    directory = tested_export("llama", spec("dms", window=100))
    assert verify.main([str(directory)]) == 0
    assert "nothing expired" in capsys.readouterr().out


def test_verify_on_bad_input(export, spec, stories, tmp_path, capsys):
    untested = export("llama", spec("dms"))
    for directory, named in (
        (tmp_path / "absent", "no such file"),
        (stories, "dense model"),
        (untested, "no self-test"),
    ):
        assert verify.main([str(directory)]) == 2
        error = capsys.readouterr().err
        assert named in error
        assert error.count("\n") == 1


def test_verify_on_a_truncated_file(tested_export, spec, capsys):
    directory = tested_export("llama", spec("dms"))
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-5])
    assert verify.main([str(directory)]) == 2
    assert "model.safetensors" in capsys.readouterr().err


def test_verify_on_another_models_reference(tested_export, export, spec, capsys):
    reference = SelfTest.load(tested_export("qwen3", spec("dms")))
    wrong = SelfTest(
        input_ids=reference.input_ids,
        decision_logits=reference.decision_logits[:1],
        logits=reference.logits,
    )
    assert verify.main([str(export("qwen3", spec("dms"), selftest=wrong))]) == 2
    assert "another model" in capsys.readouterr().err


def test_verify_takes_no_options_of_generate_from_the_export(tested_export, spec):
    directory = tested_export("llama", spec("dms", window=8))
    stated = {"num_beams": 2, "max_time": 1e-9, "do_sample": True}
    (directory / "generation_config.json").write_text(json.dumps(stated))
    assert replay(directory).passed


def test_verify_on_two_tokens(tested_export, export, spec, capsys):
    reference = SelfTest.load(tested_export("llama", spec("dms")))
    short = SelfTest(
        input_ids=reference.input_ids[:2],
        decision_logits=reference.decision_logits[..., :2],
        logits=reference.logits[:2],
    )
    assert verify.main([str(export("llama", spec("dms"), selftest=short))]) == 2
    assert "too short" in capsys.readouterr().err


def facts(path, capsys):
    assert inspect.main([str(path), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(("family", "preset"), CASES)
def test_inspect_export(tested_export, spec, capsys, family, preset):
    directory = tested_export(family, spec(preset))
    found = facts(directory, capsys)
    assert found["kind"] == "Hugging Face DMS export"
    assert found["family"] == family
    assert found["spec"] == spec(preset).to_dict()
    assert (found["cr_factor"], found["target_cr"]) == (1.7, 4.0)
    assert found["selftest"] is True
    assert list(found["dtype"]) == ["BF16"]
    assert found["provenance"]["step"] == 7
    assert inspect.main([str(directory)]) == 0
    assert "spec.window" in capsys.readouterr().out


def test_inspect_dense(stories, capsys):
    found = facts(stories, capsys)
    assert found["kind"] == "Hugging Face dense model"
    assert found["parameters"] == 260_032
    assert len(found["tokenizer_sha256"]) == 16


def test_inspect_checkpoint(tmp_path, capsys):
    (tmp_path / "run_state.json").write_text('{"step": 12}')
    (tmp_path / "shard").write_bytes(b"x" * 88)
    found = facts(tmp_path, capsys)
    assert found == {"kind": "Megatron checkpoint", "bytes": 100, "run_state": {"step": 12}}


def test_inspect_run(tmp_path, capsys):
    (tmp_path / "config.yaml").write_text("")
    (tmp_path / "metrics.jsonl").write_text("{}\n{}\n")
    (tmp_path / "checkpoints" / "step-2").mkdir(parents=True)
    (tmp_path / "weights" / "zero_neuron").mkdir(parents=True)
    assert facts(tmp_path, capsys) == {
        "kind": "run folder",
        "config": True,
        "checkpoints": ["step-2"],
        "weights": ["zero_neuron"],
        "exports": [],
        "metrics_lines": 2,
    }


def test_inspect_pair(tested_export, spec, tmp_path, capsys):
    pair = tmp_path / "final"
    (pair / "megatron").mkdir(parents=True)
    (pair / "megatron" / "run_state.json").write_text("{}")
    tested_export("llama", spec("dms")).rename(pair / "hf")
    found = facts(pair, capsys)
    assert found["kind"] == "export folder"
    assert found["hf"]["format"] == "dms"
    assert found["megatron"]["run_state"] == {}


def test_inspect_unknown(tmp_path, capsys):
    for path in (tmp_path, tmp_path / "absent"):
        assert inspect.main([str(path)]) == 2
        assert capsys.readouterr().err.startswith("dms-inspect: ")
