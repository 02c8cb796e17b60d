"""vLLM's HTTP server with the plugin, and the official client of OpenAI's API."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="pip install 'dms-train[vllm]'")
pytest.importorskip("model_hosting_container_standards", reason="vLLM's server needs it")

from openai import OpenAI
from transformers import LlamaConfig

from benchmarks.word_tokenizer import EOD, write_word_tokenizer
from dms_train.evaluation.scaling.chains import PromptedDocument
from dms_train.evaluation.scaling.served import ChainServer
from dms_train.evaluation.tasks.base import Document
from dms_train.evaluation.tasks.prompts import load_tokenizer
from dms_train.inference.llm import LLM
from dms_train.inference.options import SamplingParams
from dms_train.launch.serve import command
from tests.support.launch import free_ports
from tests.unit.inference.conftest import tiny_architecture
from tests.unit.vllm_plugin.conftest import ROOT
from tests.unit.vllm_plugin.test_engine import EXPORTS, NEW_TOKENS, PROMPTS, write

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]
START_SECONDS = 900


# Reads a command line as `vllm serve` does.
PARSER = """
import json, sys
import tests.support.vllm_server
from vllm.entrypoints.cli.serve import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
values = vars(make_arg_parser(FlexibleArgumentParser()).parse_args(sys.argv[1:]))
names = [name for name in values if name.startswith("data_parallel_")]
print(json.dumps({name: values[name] for name in ["headless", "model_tag", "port", *names]}))
"""


def test_vllm_reads_the_options_of_a_job(vllm_environment: dict[str, str]) -> None:
    job = {"SLURM_NNODES": "3", "SLURM_NODEID": "1", "SLURM_JOB_ID": "70123"}
    job |= {"SLURM_LAUNCH_NODE_IPADDR": "10.0.0.7", "SLURM_GPUS_ON_NODE": "8"}
    words = command(["EXPORT", "--port", "8001"], job)
    done = subprocess.run(
        [sys.executable, "-c", PARSER, *words[2:]],
        env=vllm_environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    expected = {"headless": True, "model_tag": "EXPORT", "port": 8001}
    expected |= {"data_parallel_size": 24, "data_parallel_size_local": 8}
    expected |= {"data_parallel_address": "10.0.0.7", "data_parallel_rpc_port": 30123}
    expected |= {"data_parallel_start_rank": 8}
    assert {name: found[name] for name in expected} == expected


@dataclass
class Server:
    """A server, and the export that it serves."""

    model: str
    url: str

    @property
    def client(self) -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key="none", timeout=1200)

    def get(self, route: str) -> str:
        with urllib.request.urlopen(self.url + route, timeout=60) as answer:
            return answer.read().decode()


def wait_until_healthy(server: Server, process: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end and process.poll() is None:
        try:
            server.get("/health")
        except OSError:
            time.sleep(1)
        else:
            return
    raise AssertionError(log.read_text()[-3000:])


@pytest.fixture(scope="module")
def server(
    vllm_environment: dict[str, str], declared_loggers: Path, tmp_path_factory: Any
) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("server")
    model = write(folder / "export", *EXPORTS["llama-dms"])
    words = [EOD, *(f"w{number}" for number in range(1, tiny_architecture("llama").vocab_size))]
    write_word_tokenizer(Path(model), tuple(words))
    port = str(free_ports(1)[0])
    environment = {**vllm_environment, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    limits = ["--max-model-len", "256", "--max-num-seqs", "4", "--max-num-batched-tokens", "48"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.vllm_server", model, "--port", port, *limits],
            env=environment,
            cwd=declared_loggers,  # the first folder of sys.path
            stdout=log,
            stderr=log,
        )
    found = Server(model, f"http://127.0.0.1:{port}")
    try:
        wait_until_healthy(found, process, folder / "log")
        yield found
    finally:
        process.terminate()
        process.wait(60)


def test_the_client_gets_the_tokens_of_the_own_engine(server: Server) -> None:
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    outputs = LLM(server.model, dtype="float32").generate(PROMPTS, params)
    assert server.client.models.list().data[0].id == server.model
    answer = server.client.completions.create(
        model=server.model,
        prompt=PROMPTS,
        max_tokens=NEW_TOKENS,
        temperature=0,
        extra_body={"ignore_eos": True, "return_token_ids": True},
    )
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == sum(map(len, PROMPTS))
    found = [choice.token_ids for choice in sorted(answer.choices, key=lambda c: c.index)]
    assert found == [output.outputs[0].token_ids for output in outputs]


def test_log_probabilities_of_a_prompt_are_those_of_the_own_engine(server: Server) -> None:
    """The client of lm-evaluation-harness reads these; the prompt takes two chunks."""
    prompt = PROMPTS[2]
    answer = server.client.completions.create(
        model=server.model, prompt=prompt, max_tokens=1, echo=True, logprobs=1, temperature=0
    )
    assert answer.choices[0].logprobs is not None
    first, *found = answer.choices[0].logprobs.token_logprobs[: len(prompt)]
    scores = LLM(server.model, dtype="float32").logits(prompt).log_softmax(1)
    expected = scores[:-1].gather(1, torch.tensor(prompt[1:])[:, None])[:, 0].tolist()
    assert first is None
    assert found == pytest.approx(expected, abs=1e-4)


def test_a_stream_has_the_text_of_the_whole_answer(server: Server) -> None:
    asked: dict[str, Any] = {"model": server.model, "prompt": PROMPTS[1], "temperature": 0}
    asked |= {"max_tokens": NEW_TOKENS, "extra_body": {"ignore_eos": True}}
    whole = server.client.completions.create(**asked).choices[0].text
    parts = [
        part.choices[0].text for part in server.client.completions.create(**asked, stream=True)
    ]
    assert len(whole.split()) == NEW_TOKENS
    assert len(parts) > 1
    assert "".join(parts) == whole


def test_dms_eval_gets_the_chains_of_the_own_engine(server: Server) -> None:
    tokenizer = load_tokenizer(Path(server.model))
    # the export names no end of text, and vLLM then takes that of the tokenizer and of LlamaConfig
    ends = (*tokenizer.encode(EOD), LlamaConfig().eos_token_id)
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, stop_token_ids=ends)
    prompts = [" ".join(f"w{token}" for token in prompt if token) for prompt in PROMPTS]
    documents = [
        PromptedDocument(
            document=Document(id=str(number), question=prompt, gold=()),
            prompt=tokenizer.encode(prompt),
            params=params,
        )
        for number, prompt in enumerate(prompts)
    ]
    chains = ChainServer(f"{server.url}/v1", None, Path(server.model)).generate(documents, 2)
    found = {chain.prompted.document.question: chain for chain in chains}
    assert set(found) == set(prompts)
    for output in LLM(server.model, dtype="float32").generate(prompts, params):
        (own,), (chain,) = output.outputs, found[output.prompt].chains
        assert found[output.prompt].prompt_tokens == len(output.prompt_token_ids)
        assert chain.text.split() == own.text.split()
        assert chain.tokens == len(own.token_ids)
        assert chain.finish_reason == own.finish_reason


def test_metrics_count_tokens_and_an_empty_cache_afterwards(server: Server) -> None:
    before = metrics(server).get("vllm:generation_tokens_total", 0.0)
    server.client.completions.create(
        model=server.model,
        prompt=PROMPTS[1],
        max_tokens=5,
        temperature=0,
        extra_body={"ignore_eos": True},
    )
    values = metrics(server)
    assert values["vllm:generation_tokens_total"] == before + 5
    assert values["vllm:kv_cache_usage_perc"] == 0
    assert 0 <= values["dms:page_usage_perc"] < 1
    assert values["dms:compression_ratio"] > 0


def metrics(server: Server) -> dict[str, float]:
    lines = server.get("/metrics").splitlines()
    named = (line for line in lines if line.startswith(("vllm:", "dms:")))
    return {line.partition("{")[0]: float(line.rpartition(" ")[2]) for line in named}
