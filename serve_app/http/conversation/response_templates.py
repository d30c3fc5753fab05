"""How the served model's answers are written: which response template holds, and readers of answers by it.

A response template is transformers' own format: which markers begin and end reasoning, content and tool calls.
"""

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Literal

from transformers.utils.chat_parsing.response_templates import ResponseTemplate, load_response_template

from cluster.errors import ConfigError
from serve_app.http.conversation.reading import PlainReader, Reader, ResponseReader

Configured = Literal["auto", "none"] | Mapping[str, Any]


class ResponseReaders:
    """Makes a reader for each answer."""

    def __init__(self, tokenizer: Any, template: ResponseTemplate | None) -> None:
        self._tokenizer = tokenizer
        self._template = template

    @property
    def tells_parts(self) -> bool:
        """Whether answers are more than content."""
        return self._template is not None

    def reader(self, prompt: Sequence[int], tools: Sequence[Mapping[str, Any]]) -> Reader:
        """A reader of what follows the prompt, where these tools are offered."""
        template = self._template
        if template is None:
            return PlainReader()

        def start(text: str) -> Any:
            anchored = text if template.start_anchor_re.search(text) else ""  # else all of it were read as an answer
            return self._tokenizer.get_response_parser(template, prefix=anchored, tools=list(tools) or None)

        return ResponseReader(start, self._tokenizer.decode(list(prompt)), offers_tools=bool(tools))


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
