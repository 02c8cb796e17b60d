"""Chat template of a model directory, which turns chat messages into a prompt."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from dms_train.hf.chat_messages import find_lost, with_known_roles
from dms_train.hf.json_files import read_json
from dms_train.hf.tokenizer_files import TOKENIZER_CONFIG, read_chat_tokenizer
from dms_train.inference.errors import InferenceError

_LOOPS = "jinja2.ext.loopcontrols"  # enabled in transformers' environment
_NO_TEMPLATE = "the model has no chat template; use LLM.generate or /v1/completions"


class ChatTemplate:
    """Chat template of a model; transformers runs it in Jinja's sandbox.

    Args:
        tokenizer: Tokenizer of transformers; None for a model without a template.
    """

    def __init__(self, tokenizer: Any | None) -> None:
        self._tokenizer = tokenizer

    @classmethod
    def load(cls, directory: Path) -> ChatTemplate:
        """Read the local files of a directory; code in it is never run.

        Raises:
            HFError: The directory has a template that cannot be read.
            InferenceError: The template is not text.
        """
        if not _has_template(directory):
            return cls(None)
        tokenizer = read_chat_tokenizer(directory)
        if not isinstance(tokenizer.chat_template, str | dict | None):
            raise InferenceError(f"{directory}: chat_template is not text; correct it")
        return cls(tokenizer if tokenizer.chat_template else None)

    def render(
        self,
        messages: list[dict[str, str]],
        variables: Mapping[str, Any] | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> str:
        """Render messages as the text that the model continues as the assistant.

        The role `developer` becomes `system` if the template does not name it.

        Args:
            messages: As `plain_messages` returns them.
            variables: Further variables of the template, such as `enable_thinking` of Qwen3.
            add_generation_prompt: End with the beginning of an assistant message.
            continue_final_message: End inside the last message, which the model continues.

        Raises:
            InferenceError: There is no template, the template does not read a variable, it
                refuses the messages, or it leaves one out.
        """
        variables = {} if variables is None else variables
        self.check_variables(variables)
        if self._tokenizer is None:
            raise InferenceError(_NO_TEMPLATE)
        for index, message in enumerate(messages):
            if message.get("reasoning_content") and "reasoning_content" not in self.source:
                raise InferenceError(
                    f"messages.{index}.reasoning_content: the chat template does not read it; "
                    "leave it out"
                )
        apply = partial(
            self._tokenizer.apply_chat_template,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            **variables,
        )
        messages = with_known_roles(messages, self.source)
        try:
            text: str = apply(messages)
        except Exception as error:  # templates raise errors of any type about their messages
            reason = " ".join(str(error).split())[:200]
            raise InferenceError(f"messages: the chat template refuses them: {reason}") from None
        lost = find_lost(messages, apply)
        if lost is not None:
            raise InferenceError(
                f"messages.{lost}: the chat template leaves out this message of role "
                f"{messages[lost]['role']!r}; use another role or order"
            )
        return text

    def check_variables(self, variables: Mapping[str, Any]) -> None:
        """Fail if the template does not read one of these variables.

        Raises:
            InferenceError: There is no template, or it does not read one of them.
        """
        if not isinstance(variables, Mapping):
            raise InferenceError("chat_template_kwargs: give variables and values by name")
        if not variables:
            return
        if self._tokenizer is None:
            raise InferenceError(f"chat_template_kwargs: {_NO_TEMPLATE}")
        taken = {*inspect.signature(self._tokenizer.apply_chat_template).parameters, "messages"}
        for name in map(str, variables):
            where = f"chat_template_kwargs.{name[:100]}"
            if name in taken:
                raise InferenceError(f"{where}: cannot be set there; leave it out")
            if name not in self._variables:
                raise InferenceError(f"{where}: the chat template does not read it; leave it out")

    @property
    def source(self) -> str:
        """Text of the template, or of all named templates; empty without one."""
        source = "" if self._tokenizer is None else self._tokenizer.chat_template
        return source if isinstance(source, str) else "\n".join(source.values())

    @cached_property
    def _variables(self) -> set[str]:
        """Variables that the template reads and does not only set."""
        from jinja2 import Environment, TemplateSyntaxError, meta

        # jinja2 does not know this tag of transformers, which marks the assistant's text
        source = re.sub(r"{%-?\s*(end)?generation\s*-?%}", "", self.source)
        try:
            return meta.find_undeclared_variables(Environment(extensions=[_LOOPS]).parse(source))
        except TemplateSyntaxError:
            return set()  # such a template refuses all messages


def _has_template(directory: Path) -> bool:
    """Return True if the directory has a file with a template."""
    if any((directory / name).exists() for name in ("chat_template.jinja", "chat_template.json")):
        return True
    config = directory / TOKENIZER_CONFIG
    return config.is_file() and "chat_template" in read_json(config)
