"""Chat templates in this process: which one a tokenizer has, and the text that one makes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError
from transformers.utils.chat_template_utils import render_jinja_template

MAX_MESSAGE_CHARS = 1000

Values = Mapping[str, Any]
"""Keyword arguments of transformers' `render_jinja_template`, apart from the template and its conversations."""


@dataclass(frozen=True, slots=True)
class Rendering:
    """A template and all that it sees."""

    template: str
    messages: list[dict[str, Any]]
    values: Values
    max_chars: int  # of the text

    def as_json(self) -> dict[str, Any]:
        """Returns the fields; `asdict` would copy the conversation."""
        return {
            "template": self.template,
            "messages": self.messages,
            "values": self.values,
            "max_chars": self.max_chars,
        }


Render = Callable[[Rendering], str]
"""Returns the text of a conversation; raises whatever the template raises, or TemplateFailure."""


class TemplateFailure(Exception):
    """A template raised, or exceeded a limit; the message says which."""


def render_here(rendering: Rendering) -> str:
    """Renders without a limit on time, for tools and tests that trust their templates."""
    texts, _ = render_jinja_template(
        conversations=[rendering.messages], chat_template=rendering.template, **rendering.values
    )
    text = str(texts[0])
    if len(text) > rendering.max_chars:
        raise TemplateFailure(f"its text has {len(text)} characters, more than fit the context")
    return text


def describe(error: BaseException) -> str:
    """Returns an error's message; the type precedes it unless the template itself worded it."""
    if isinstance(error, TemplateError | TemplateFailure | ValueError | TypeError):
        return str(error)[:MAX_MESSAGE_CHARS]
    return f"{type(error).__name__}: {error}"[:MAX_MESSAGE_CHARS].removesuffix(": ")
