"""Renders conversations with chat templates and tokenizes them into prompts."""

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from jinja2 import TemplateError
from transformers.utils.chat_template_utils import render_jinja_template

from cluster.errors import ModelError, RequestError, SlipstreamError

MAX_MESSAGE_CHARS = 1000

Values = Mapping[str, Any]
"""Keyword arguments of transformers' `render_jinja_template`, except the template and the conversations."""


@dataclass(frozen=True, slots=True)
class Rendering:
    """A chat template and all variables passed to it."""

    template: str
    messages: list[dict[str, Any]]
    values: Values
    max_chars: int  # limit on the rendered text

    def as_json(self) -> dict[str, Any]:
        """Returns the fields as a dictionary; `asdict` would copy the conversation."""
        return {
            "template": self.template,
            "messages": self.messages,
            "values": self.values,
            "max_chars": self.max_chars,
        }


Render = Callable[[Rendering], str]
"""Renders a conversation. Raises TemplateFailure or any exception from the template."""


class TemplateFailure(Exception):
    """Raised if a template fails or exceeds a limit; the message gives the reason."""


def render_here(rendering: Rendering) -> str:
    """Renders in this process without a time limit, for tools and tests that trust their templates."""
    texts, _ = render_jinja_template(
        conversations=[rendering.messages], chat_template=rendering.template, **rendering.values
    )
    text = str(texts[0])
    if len(text) > rendering.max_chars:
        raise TemplateFailure(f"the rendered text has {len(text)} characters, more than the context can hold")
    return text


def describe(error: BaseException) -> str:
    """Returns an error's message, with its type unless templates commonly raise it."""
    if isinstance(error, TemplateError | TemplateFailure | ValueError | TypeError):
        return str(error)[:MAX_MESSAGE_CHARS]
    return f"{type(error).__name__}: {error}"[:MAX_MESSAGE_CHARS].removesuffix(": ")


MadeT = TypeVar("MadeT")

Message = Mapping[str, Any]
"""Chat message in the form that templates expect: role, content and optional fields."""

DEFAULT = "default"  # transformers' name for the default template
TOOL_USE = "tool_use"
MAX_CHARS = 1 << 25  # limit on rendered text if the context length is unknown


@dataclass(frozen=True, slots=True)
class TemplateOptions:
    """Options for rendering a conversation."""

    tools: Sequence[Mapping[str, Any]] = ()
    variables: Mapping[str, Any] = field(default_factory=dict)  # additional template variables
    begins_answer: bool = True
    continues_last: bool = False


@dataclass(frozen=True, slots=True)
class Templates:
    """A tokenizer's chat templates without and with tools; they may be identical."""

    plain: str
    with_tools: str


def templates_of(tokenizer: Any) -> Templates | None:
    """Returns the tokenizer's templates, or None if it has none.

    Raises ModelError if it has several templates and none is the default.
    """
    templates = tokenizer.chat_template
    if not templates:
        return None
    if isinstance(templates, str):
        return Templates(templates, templates)
    plain = templates.get(DEFAULT) or (next(iter(templates.values())) if len(templates) == 1 else None)
    if plain is None:
        names = ", ".join(sorted(templates))
        raise ModelError(
            f"the tokenizer has several chat templates ({names}) and none is named '{DEFAULT}';"
            f" rename the template for ordinary chats to '{DEFAULT}'"
        )
    return Templates(plain, templates.get(TOOL_USE, plain))


class ChatTemplate:
    """Renders and tokenizes conversations."""

    def __init__(
        self,
        tokenizer: Any,
        *,
        special_tokens_in_text: bool = False,
        render: Render = render_here,
        max_chars: int = MAX_CHARS,
    ) -> None:
        """Raises ModelError if the tokenizer has several templates and none is the default.

        With `special_tokens_in_text`, the text of a special token in a message becomes that token. `max_chars` limits
        the rendered text.
        """
        self._tokenizer = tokenizer
        self._special_tokens_in_text = special_tokens_in_text
        self._render = render
        self._max_chars = max_chars
        self._templates = templates_of(tokenizer)
        parameters = inspect.signature(tokenizer.apply_chat_template).parameters
        self._reserved = frozenset(parameters) | {"messages"}

    def encode(self, messages: Sequence[Message], options: TemplateOptions) -> tuple[int, ...]:
        """Tokenizes a conversation up to the start or the continuation of the assistant's message.

        Raises RequestError for `messages` if the template fails.
        """
        sanitized = not self._special_tokens_in_text
        return self._attempt(lambda: self._tokens(self._text(messages, options, sanitized=sanitized), sanitized))

    def written(self, messages: Sequence[Message], options: TemplateOptions) -> str:
        """Renders a conversation from a trusted source."""
        return self._attempt(lambda: self._text(messages, options, sanitized=False))

    def takes(self, variable: str, *, with_tools: bool = False) -> bool:
        """Returns whether the template mentions this variable or role."""
        if self._templates is None:
            return False
        text = self._templates.with_tools if with_tools else self._templates.plain
        return re.search(rf"\b{re.escape(variable)}\b", text) is not None

    def _attempt(self, work: Callable[[], MadeT]) -> MadeT:
        try:
            return work()
        except SlipstreamError:
            raise
        except Exception as error:  # templates are programs and may raise anything
            message = f"messages: the model's chat template refuses them: {describe(error)}"
            raise RequestError(message, "messages") from error

    def _text(self, messages: Sequence[Message], options: TemplateOptions, *, sanitized: bool) -> str:
        """Renders like transformers' `apply_chat_template`, with the injected renderer."""
        if self._templates is None:
            raise RequestError("messages: this model has no chat template; use /v1/completions", "messages")
        self._check_variables(options.variables)
        template = self._templates.with_tools if options.tools else self._templates.plain
        # Drop None: templates handle missing fields, but rarely None values.
        chat = [{name: part for name, part in message.items() if part is not None} for message in messages]
        if not chat:
            raise ValueError("the conversation is empty; add a message")
        if options.continues_last and options.begins_answer:
            raise ValueError("continue_final_message requires add_generation_prompt to be false")
        tools = [dict(tool) for tool in options.tools] or None
        variables: Any = dict(options.variables)
        if sanitized:
            (chat,), tools, _, variables = self._tokenizer._mark_chat_inputs(
                template, [chat], tools, None, variables, tokenize=True, assistant_mask=False
            )
        values = {
            **self._tokenizer.special_tokens_map,
            **variables,
            "tools": tools,
            "continue_final_message": options.continues_last,
            "add_generation_prompt": options.begins_answer,
        }
        return self._render(Rendering(template, chat, values, self._max_chars))

    def _tokens(self, text: str, sanitized: bool) -> tuple[int, ...]:
        return tuple(self._tokenizer(text, add_special_tokens=False, sanitize_control_tokens=sanitized).input_ids)

    def _check_variables(self, variables: Mapping[str, Any]) -> None:
        if reserved := sorted(self._reserved & variables.keys()):
            message = (
                f"chat_template_kwargs: {reserved[0]} is set by the server; expected names that the template defines"
            )
            raise RequestError(message, "chat_template_kwargs")
