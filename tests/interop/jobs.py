"""Input and output of both workers in the other project's environment: JSON jobs, tensors."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import Tensor
from transformers import PreTrainedTokenizerFast


def main(actions: dict[str, Callable[..., dict[str, Tensor]]]) -> None:
    """Do the jobs of the file in argv, each a call of an action; `out` is where tensors go."""
    for job in json.loads(Path(sys.argv[1]).read_text()):
        action, out = actions[job.pop("do")], job.pop("out")
        tensors = action(**job)
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, out)


def pieces(tokens: list[int], prompt: int) -> list[list[int]]:
    """The prompt, then one token at a time."""
    return [tokens[:prompt], *([token] for token in tokens[prompt:])]


def word_tokenizer(words: int) -> PreTrainedTokenizerFast:
    """A tokenizer of the words `w0`, `w1`, ...; `w0` ends texts."""
    inner = Tokenizer(WordLevel({f"w{i}": i for i in range(words)}, unk_token="w0"))
    inner.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="w0", unk_token="w0")
