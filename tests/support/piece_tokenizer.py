"""A tokenizer as of Llama 2: words with their blank in front, bytes for all other characters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, processors, trainers

BEGIN, END = "<s>", "</s>"
_WORDS = ("there was a cat", "to the park", "who was there", "the cat was a toy", "a park")


def write_tokenizer(folder: Path, **config: Any) -> Path:
    """Write `tokenizer.json` and `tokenizer_config.json`, with further keys of the latter."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    names = ["<unk>", BEGIN, END, *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=330, special_tokens=names, show_progress=False)
    words = [word for line in _WORDS for word in line.split()]
    tokenizer.train_from_iterator(words * 5, trainer)
    described = json.loads(tokenizer.to_str())
    # bytes are pieces of the vocabulary, not tokens that are found in a text
    described["added_tokens"] = described["added_tokens"][:3]
    tokenizer = Tokenizer.from_str(json.dumps(described))
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A", pair=f"{BEGIN} $A {BEGIN} $B", special_tokens=[(BEGIN, 1)]
    )
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    values = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{"bos_token": BEGIN, "eos_token": END, "unk_token": "<unk>"},
        **config,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(values), encoding="utf-8")
    return folder
