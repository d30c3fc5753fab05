"""How the served model's answers are written: which response template holds, and readers of answers by it.

A response template is transformers' own format: which markers begin and end reasoning, content and tool calls.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, Literal

from transformers.utils.chat_parsing.response_templates import ResponseTemplate, load_response_template

from cluster.errors import ConfigError
from serve_app.http.conversation.output_parser import CALLS_FIELD, REASONING_FIELDS, PlainReader, Reader, ResponseReader

Configured = Literal["auto", "none"] | Mapping[str, Any]
ReasoningInPrompt = Literal["none", "begun", "over"]


class ResponseReaders:
    """Makes a reader for each answer."""

    def __init__(self, tokenizer: Any, template: ResponseTemplate | None) -> None:
        self.template = template
        self._tokenizer = tokenizer

    @property
    def tells_parts(self) -> bool:
        """Whether answers are more than content."""
        return self.template is not None

    def reader(self, prompt: Sequence[int], tools: Sequence[Mapping[str, Any]]) -> Reader:
        """A reader of what follows the prompt, where these tools are offered."""
        if self.template is None:
            return PlainReader()
        start = partial(self._parser, tools=tools)
        text = self._tokenizer.decode(list(prompt))
        return ResponseReader(start, text, offers_tools=bool(tools), json_opening=self._json_opening)

    def reasoning_in(self, prompt: str) -> ReasoningInPrompt:
        """What a prompt has of the answer's reasoning."""
        if self.template is None:
            return "none"
        events = self._parser(prompt).initial_events
        kinds = [event["type"] for event in events if event["field"] in REASONING_FIELDS]
        if not kinds:
            return "none"
        return "over" if kinds[-1] == "region_close" else "begun"

    @property
    def _json_opening(self) -> Any:
        """What begins a call, where calls are JSON as it is written everywhere."""
        assert self.template is not None, "there is a template to parse by"
        calls = self.template.fields.get(CALLS_FIELD)
        return calls.open_re if calls is not None and calls.content == "json" and not calls.content_args else None

    def _parser(self, text: str, tools: Sequence[Mapping[str, Any]] = ()) -> Any:
        """A parser of what follows this text."""
        assert self.template is not None, "there is a template to parse by"
        anchored = text if self.template.start_anchor_re.search(text) else ""  # else all of it were read as an answer
        return self._tokenizer.get_response_parser(self.template, prefix=anchored, tools=list(tools) or None)


def find_template(configured: Configured, tokenizer: Any, model_type: str) -> ResponseTemplate | None:
    """The template that the configuration gives or leaves to be found: the checkpoint's, or one for its architecture.

    Raises ConfigError for one that is none.
    """
    if configured == "none":
        return None
    given = _known_template(tokenizer, model_type) if isinstance(configured, str) else configured
    try:
        return None if given is None else load_response_template(dict(given))
    except (ValueError, TypeError) as error:
        raise ConfigError(f"server.response_template is no response template of transformers: {error}") from error


def _known_template(tokenizer: Any, model_type: str) -> Mapping[str, Any] | None:
    # Of `transformers serve`, and loaded with it: it knows the templates of checkpoints that bring none.
    from transformers.cli.serving.utils import get_response_template

    found: Mapping[str, Any] | None = get_response_template(
        tokenizer, SimpleNamespace(config=SimpleNamespace(model_type=model_type))
    )
    return found
