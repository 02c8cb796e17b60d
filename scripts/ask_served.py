"""Serve a model with `dms-serve`, ask it one question, and print the answer and its cache."""

from __future__ import annotations

import argparse
import json
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_LISTENS = re.compile(r"serving .* on (http://\S+)")


@contextmanager
def served(model: str) -> Iterator[str]:
    """Serve a model on a free port inside the block; yield the server's address."""
    command = [sys.executable, "-m", "dms_train.cli.serve", model, "--port", "0"]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert server.stderr is not None
        lines = []
        for line in server.stderr:
            lines.append(line)
            if found := _LISTENS.search(line):
                yield found[1]
                return
        raise SystemExit(f"dms-serve ended: {''.join(lines[-3:]).strip()}")
    finally:
        server.send_signal(signal.SIGTERM)
        server.communicate()


def ask(address: str, question: str, max_tokens: int) -> dict[str, Any]:
    """Return the answer of the server to one turn of a user, decoded greedily."""
    body = {
        "messages": [{"role": "user", "content": question}],
        "max_completion_tokens": max_tokens,
        "temperature": 0,
    }
    request = urllib.request.Request(
        f"{address}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as response:
        answer: dict[str, Any] = json.load(response)
    return answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="model directory or export")
    parser.add_argument("question")
    parser.add_argument("--max-tokens", type=int, default=100)
    args = parser.parse_args()
    with served(args.model) as address:
        answer = ask(address, args.question, args.max_tokens)
    usage = answer["usage"]
    print(f"user: {args.question}")
    print(f"model: {answer['choices'][0]['message']['content'].strip()}")
    print(
        f"cache: {usage['total_tokens']} tokens seen, at most "
        f"{usage['kv']['peak_live_tokens']:.1f} held by a KV head on average"
    )


if __name__ == "__main__":
    main()
