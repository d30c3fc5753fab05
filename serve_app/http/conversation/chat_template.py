"""The model's chat template: from a conversation to the tokens of a prompt."""

import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jinja2 import TemplateError

from cluster.errors import RequestError

Message = Mapping[str, Any]
"""As chat templates take them: role, content, and what else there is."""


@dataclass(frozen=True, slots=True)
class TemplateOptions:
    """How a conversation is put."""

    tools: Sequence[Mapping[str, Any]] = ()
    variables: Mapping[str, Any] = field(default_factory=dict)  # beside those that every template has
    begins_answer: bool = True
    continues_last: bool = False


class ChatTemplate:
    """Renders and tokenises conversations."""

    def __init__(self, tokenizer: Any, *, special_tokens_in_text: bool = False) -> None:
        """`special_tokens_in_text`: whether control tokens that are spelled in a message are taken as tokens."""
        self._tokenizer = tokenizer
        self._special_tokens_in_text = special_tokens_in_text
        parameters = inspect.signature(tokenizer.apply_chat_template).parameters
        self._reserved = frozenset(parameters) | {"messages"}

    def encode(self, messages: Sequence[Message], options: TemplateOptions) -> tuple[int, ...]:
        """Tokens of a conversation, up to where the assistant begins or goes on."""
        if self._tokenizer.chat_template is None:
            raise RequestError("messages: this model has no chat template; use /v1/completions", "messages")
        self._check_variables(options.variables)
        try:
            tokens = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tools=[dict(tool) for tool in options.tools] or None,
                add_generation_prompt=options.begins_answer,
                continue_final_message=options.continues_last,
                sanitize_control_tokens=not self._special_tokens_in_text,
                return_dict=False,
                **options.variables,
            )
        except (TemplateError, TypeError, ValueError) as error:
            raise RequestError(f"messages: the model's chat template refuses them: {error}", "messages") from error
        return tuple(tokens)

    def takes(self, variable: str, *, with_tools: bool = False) -> bool:
        """Whether the template looks at a variable or a role of that name."""
        if self._tokenizer.chat_template is None:
            return False
        text = self._tokenizer.get_chat_template(tools=[{}] if with_tools else None)
        return re.search(rf"\b{re.escape(variable)}\b", text) is not None

    def _check_variables(self, variables: Mapping[str, Any]) -> None:
        if taken := sorted(self._reserved & variables.keys()):
            message = (
                f"chat_template_kwargs: {taken[0]} is not for the client to set; expected the template's own names"
            )
            raise RequestError(message, "chat_template_kwargs")
