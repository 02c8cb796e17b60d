"""A tokenizer with the special tokens of the R1 distills, and a template that drops reasoning."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

# The bars are full-width ones, U+FF5C.
BEGIN, END = "<\uff5cbegin▁of▁sentence\uff5c>", "<\uff5cend▁of▁sentence\uff5c>"
USER, ASSISTANT = "<\uff5cUser\uff5c>", "<\uff5cAssistant\uff5c>"
# As the stock template does, only what follows </think> is kept of an assistant turn.
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    f"{{% if m['role'] == 'user' %}}{{{{ '{USER}' + m['content'] }}}}"
    "{% elif m['role'] == 'assistant' %}{% set content = m['content'] %}"
    "{% if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}"
    f"{{{{ '{ASSISTANT}' + content + '{END}' }}}}"
    "{% else %}{{ m['content'] }}{% endif %}{% endfor %}"
    f"{{% if add_generation_prompt %}}{{{{ '{ASSISTANT}<think>\\n' }}}}{{% endif %}}"
)
_TEXT = [
    "Okay, let me work through this problem. Natalia sold 48/2 = 24 clips in May.",
    "Wait, let me check this again. I think the result is 72.",
    "Therefore, the answer is: $\\boxed{\\frac{14}{3}}$",
]


def write_tokenizer(folder: Path, template: str | None = TEMPLATE) -> None:
    """Byte-level BPE of fewer than 512 tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=[BEGIN, END, USER, ASSISTANT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXT, trainer)
    tokenizer.add_tokens(["<think>", "</think>"])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BEGIN,
        "eos_token": END,
        "clean_up_tokenization_spaces": False,
    }
    if template is not None:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
