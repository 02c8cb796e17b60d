"""Tokenizer of a GGUF file as the files of a Hugging Face directory.

The ids are those of llama.cpp. Text of Qwen2 models is also normalised to NFC, which their own
tokenizer does and llama.cpp does not.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from pathlib import Path
from typing import Any

from dms_train.hf.errors import HFError
from dms_train.hf.json_files import write_json
from dms_train.hf.tokenizer_files import MODEL_INPUTS, TOKENIZER_CONFIG, TOKENIZER_FILE
from dms_train.hf.values import Values


class _Kind(IntEnum):
    """Values of `tokenizer.ggml.token_type`."""

    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5


@dataclass(frozen=True, slots=True)
class _Splitting:
    """How a byte-level tokenizer splits text before merges apply.

    Attributes:
        pattern: Regular expression of a piece; None takes the one of GPT-2.
        digits: Whether every digit is split off first.
        nfc: Whether text is normalised to NFC.
        whole_pieces: Whether a piece that is in the vocabulary is taken without merging.
        add_bos: Whether a text starts with the BOS token if the file does not say so.
    """

    pattern: str | None = None
    digits: bool = False
    nfc: bool = False
    whole_pieces: bool = False
    add_bos: bool = False


def _words(digits: str) -> str:
    """Return the pattern that Llama 3 and Qwen2 share, with their pattern of digits."""
    return (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|" + digits + r"|"
        r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


_LLAMA3 = _Splitting(pattern=_words(r"\p{N}{1,3}"), whole_pieces=True, add_bos=True)
# By `tokenizer.ggml.pre`.
_SPLITTINGS = {
    "gpt-2": _Splitting(),
    "smollm": _Splitting(digits=True),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _Splitting(pattern=_words(r"\p{N}"), nfc=True),
    "deepseek-r1-qwen": _Splitting(pattern=_words(r"\p{N}")),
}
_SPECIAL = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
_ENDS = ("eos", "eot", "eom")
# Control tokens at which llama.cpp ends an answer because of their name.
_END_NAMES = (
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end|>",
    "<end_of_turn>",
)


class GgufTokenizer:
    """Tokenizer that the metadata of a GGUF file describes.

    Args:
        metadata: Metadata of the file.
        longest: Context length of the model.

    Raises:
        HFError: The tokenizer is of an unsupported kind or incomplete; one line.
    """

    def __init__(self, metadata: Values, longest: int) -> None:
        self._metadata = metadata
        self._longest = longest
        tokens = self._list("tokens")
        types = self._list("token_type")
        if len(types) != len(tokens):
            raise self._refusal("token_type", len(types), f"state one for each of {len(tokens)}")
        # the converter of llama.cpp fills the rows of the embedding without a token
        while tokens and types[-1] == _Kind.UNUSED and tokens[-1] == f"[PAD{len(tokens) - 1}]":
            tokens, types = tokens[:-1], types[:-1]
        self._tokens: list[str] = tokens
        self._types: list[int] = types

    def _get(self, name: str) -> Any:
        return self._metadata.values.get(f"tokenizer.ggml.{name}")

    def _refusal(self, name: str, value: Any, fix: str) -> HFError:
        return self._metadata.refusal(f"tokenizer.ggml.{name}", value, fix)

    def _list(self, name: str) -> list[Any]:
        value = self._get(name)
        if not isinstance(value, list) or not value:
            raise HFError(
                f"{self._metadata.where}: tokenizer.ggml.{name} is missing; use another file"
            )
        return value

    def _id(self, name: str) -> int | None:
        """Return the id of a special token; None if the file names none."""
        value = self._get(f"{name}_token_id")
        if value is None:
            return None
        if type(value) is not int or not 0 <= value < len(self._tokens):
            fix = f"state a number below {len(self._tokens)}"
            raise self._refusal(f"{name}_token_id", value, fix)
        return value

    @cached_property
    def ids(self) -> dict[str, int]:
        """Ids of special tokens by their key in config.json."""
        named = {short: self._id(name) for name, short in _SPECIAL.items() if short != "unk"}
        return {f"{short}_token_id": i for short, i in named.items() if i is not None}

    def _end_ids(self) -> list[int]:
        """List the tokens that end an answer, the stated ones first."""
        stated = [i for i in map(self._id, _ENDS) if i is not None]
        pairs = enumerate(zip(self._tokens, self._types, strict=True))
        named = [i for i, (text, t) in pairs if t == _Kind.CONTROL and text in _END_NAMES]
        return list(dict.fromkeys([*stated, *named]))

    def write(self, directory: Path) -> None:
        """Write tokenizer.json, tokenizer_config.json and generation_config.json."""
        model = self._get("model")
        if model not in ("gpt2", "llama"):
            raise self._refusal("model", model, "use a file with one of gpt2, llama")
        tokenizer = self._byte_level() if model == "gpt2" else self._sentencepiece()
        self._add_special(tokenizer)
        self._add_ends(tokenizer, model)
        (directory / TOKENIZER_FILE).write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
        texts = {f"{short}_token": self._id(name) for name, short in _SPECIAL.items()}
        config: dict[str, Any] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": self._longest,
            "clean_up_tokenization_spaces": False,
            "model_input_names": list(MODEL_INPUTS),
            **{key: self._tokens[i] for key, i in texts.items() if i is not None},
        }
        template = self._metadata.values.get("tokenizer.chat_template")
        if template is not None:
            config["chat_template"] = template
        write_json(directory / TOKENIZER_CONFIG, config)
        ends = self._end_ids()
        generation = {**self.ids, **({"eos_token_id": ends} if ends else {})}
        write_json(directory / "generation_config.json", generation)

    @property
    def _vocabulary(self) -> dict[str, int]:
        return {text: i for i, text in enumerate(self._tokens)}

    def _splitting(self) -> _Splitting:
        name = self._get("pre")
        if name not in _SPLITTINGS:
            fix = f"use a file with one of {', '.join(_SPLITTINGS)}"
            raise self._refusal("pre", name, fix)
        return _SPLITTINGS[name]

    def _byte_level(self) -> Any:
        from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

        splitting = self._splitting()
        merges = [tuple(merge.split(" ", 1)) for merge in self._list("merges")]
        if any(len(merge) != 2 for merge in merges):
            raise self._refusal("merges", "a line without a space", "use another file")
        tokenizer = Tokenizer(
            models.BPE(self._vocabulary, merges, ignore_merges=splitting.whole_pieces)
        )
        if splitting.nfc:
            tokenizer.normalizer = normalizers.NFC()
        steps: list[Any] = []
        if splitting.digits:
            steps.append(pre_tokenizers.Digits(individual_digits=True))
        if splitting.pattern is not None:
            steps.append(pre_tokenizers.Split(Regex(splitting.pattern), "isolated"))
        own = splitting.pattern is None
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=own))
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
        tokenizer.decoder = decoders.ByteLevel()
        return tokenizer

    def _sentencepiece(self) -> Any:
        from tokenizers import Tokenizer, decoders, models, normalizers

        unknown = self._id("unknown")
        tokenizer = Tokenizer(
            models.BPE(
                self._vocabulary,
                self._merges_by_score(),
                unk_token=None if unknown is None else self._tokens[unknown],
                fuse_unk=True,
                byte_fallback=True,
            )
        )
        prefix = self._get("add_space_prefix") is not False
        steps = [normalizers.Prepend("▁")] if prefix else []
        tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
        parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        parts += [decoders.Strip(" ", 1, 0)] if prefix else []
        tokenizer.decoder = decoders.Sequence(parts)
        return tokenizer

    def _merges_by_score(self) -> list[tuple[str, str]]:
        """List all pairs of tokens that form a token, in the order in which they merge."""
        scores, known = self._list("scores"), self._vocabulary
        merges: list[tuple[float, int, int, str, str]] = []
        for text, i in known.items():
            for cut in range(1, len(text)):
                left, right = text[:cut], text[cut:]
                if left in known and right in known:
                    merges.append((-scores[i], known[left], known[right], left, right))
        return [(left, right) for *_, left, right in sorted(merges)]

    def _add_special(self, tokenizer: Any) -> None:
        """Add the tokens that are found in a text before it is split."""
        from tokenizers import AddedToken

        special = (_Kind.CONTROL, _Kind.UNKNOWN)
        tokenizer.add_tokens(
            [
                AddedToken(text, normalized=False, special=kind in special)
                for text, kind in zip(self._tokens, self._types, strict=True)
                if kind in (*special, _Kind.USER_DEFINED)
            ]
        )

    def _add_ends(self, tokenizer: Any, model: str) -> None:
        """Make the tokenizer put BOS in front of a text and EOS after it, as the file says."""
        from tokenizers import processors

        default = model == "llama" or self._splitting().add_bos
        added = {"bos": default, "eos": False}
        for name in added:
            stated = self._get(f"add_{name}_token")
            added[name] = (added[name] if stated is None else stated) and self._id(name) is not None
        if not any(added.values()):
            return
        ids = {self._tokens[i]: i for name in added if (i := self._id(name)) is not None}
        before = [self._tokens[self._id("bos") or 0]] if added["bos"] else []
        after = [self._tokens[self._id("eos") or 0]] if added["eos"] else []
        single = [*before, "$A", *after]
        pair = [*single, *(f"{text}:1" for text in before), "$B:1", *(f"{t}:1" for t in after)]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=single, pair=pair, special_tokens=list(ids.items())
        )
