"""Files of runs: whole documents survive any kill, and other configurations are refused."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path

import pytest

from dms_train.evaluation.errors import EvaluationError
from dms_train.evaluation.scaling import store
from dms_train.observe.locks import LockedError


def header(**config) -> dict:
    config = {"task": {"name": "t", "limit": None}, "sampling": {"seed": 0}, **config}
    return {"config_hash": store.config_hash(config), "config": config}


def rows(document: str, chains: int = 3) -> list[dict]:
    return [
        {"document": document, "chain": n, "chains": chains, "text": "\u00fc\n" * n}
        for n in range(chains)
    ]


def write(folder: Path, *documents: str, shard: int = 0, shards: int = 1) -> Path:
    with store.ChainWriter(folder, shard, shards) as writer:
        for document in documents:
            writer.add(rows(document))
    return folder / "chains" / f"{shard:05d}-of-{shards:05d}.jsonl"


def documents(folder: Path) -> list[str]:
    found = store.read_chains(folder)
    assert [row for name in {r["document"] for r in found} for row in rows(name)].__len__() == len(
        found
    )
    return [row["document"] for row in found if row["chain"] == 0]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    store.open_run(tmp_path / "run", header())
    return tmp_path / "run"


def test_a_kill_at_any_byte_loses_the_last_document_only(run):
    path = write(run, "a", "b", "c")
    whole = path.read_bytes()
    first, second = (len(json.dumps(r).encode()) + 1 for r in rows("a")[:2])
    ends = [sum(len(json.dumps(r).encode()) + 1 for r in rows(n)) for n in "abc"]
    assert first < second
    assert sum(ends) == len(whole)
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        kept = [n for k, n in enumerate("abc") if sum(ends[: k + 1]) <= size]
        assert documents(run) == kept
        with store.ChainWriter(run, 0, 1) as writer:
            for name in "abc"[len(kept) :]:
                writer.add(rows(name))
        assert path.read_bytes() == whole


def test_damage_before_the_end_is_not_passed_over(run):
    path = write(run, "a", "b")
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([lines[0], b"{\n", *lines[1:]]))
    with pytest.raises(EvaluationError, match=r"00000-of-00001\.jsonl:2: damaged"):
        store.read_chains(run)


def test_files_of_several_jobs_are_merged_and_nothing_counts_twice(run):
    write(run, "a", "c", shard=0, shards=2)
    write(run, "b", "d", shard=1, shards=2)
    write(run, "a", "b")
    assert documents(run) == ["a", "b", "c", "d"]


def hold(folder: Path, ready, done) -> None:
    with store.ChainWriter(folder, 0, 1):
        ready.set()
        done.wait(60)


def test_two_processes_cannot_write_one_shard(run):
    context = multiprocessing.get_context("fork")
    ready, done = context.Event(), context.Event()
    process = context.Process(target=hold, args=(run, ready, done))
    process.start()
    try:
        assert ready.wait(60)
        with (
            pytest.raises(LockedError, match=rf"already in use by process {process.pid} on "),
            store.ChainWriter(run, 0, 1),
        ):
            pass
        with store.ChainWriter(run, 1, 2) as writer:
            writer.add(rows("z"))
    finally:
        done.set()
        process.join()


def test_another_configuration_is_refused_by_the_names_of_its_keys(run):
    assert (
        store.open_run(run, {**header(), "versions": {"torch": "0"}})["config"]
        == (header()["config"])
    )
    other = header(task={"name": "t", "limit": 5}, sampling={"seed": 1})
    with pytest.raises(
        EvaluationError, match=r"run: holds a run with another sampling\.seed, task\.limit; choose"
    ):
        store.open_run(run, other)
    assert "versions" not in store.read_header(run)
    assert sorted(p.name for p in run.iterdir()) == ["chains", "run.json"]


def test_the_hash_does_not_depend_on_the_order_of_keys():
    assert store.config_hash({"a": 1, "b": {"c": 2, "d": 3}}) == store.config_hash(
        {"b": {"d": 3, "c": 2}, "a": 1}
    )
    assert store.config_hash({"a": 1}) != store.config_hash({"a": 2})


def test_runs_are_found_below_a_folder(tmp_path):
    for name in ("x/a", "x/b", "y"):
        store.open_run(tmp_path / name, header())
    found = list(store.find_runs([tmp_path / "x", tmp_path / "y"]))
    assert found == [tmp_path / "x" / "a", tmp_path / "x" / "b", tmp_path / "y"]
    with pytest.raises(EvaluationError, match=r"chains: no run\.json here or below"):
        list(store.find_runs([tmp_path / "y" / "chains"]))
    with pytest.raises(EvaluationError, match=r"absent: no run\.json"):
        list(store.find_runs([tmp_path / "absent"]))
