"""Renders conversations in the draft's own chat template, for drafts with another tokenizer than the target's."""

import logging
from pathlib import Path
from typing import Any

from actors.models.checkpoint import local_folder
from actors.models.tokenizer_reader import load_tokenizer
from cluster.config import ServerConfig
from cluster.errors import EngineError, ModelError, RequestError
from serve_app.api.chat import messages_of, options_of
from serve_app.api.chat_template import ChatTemplate, Render, render_here, templates_of
from serve_app.api.request_schemas import ChatRequest

log = logging.getLogger(__name__)


def check_template(folder: Path) -> Any:
    """Returns the tokenizer in a draft's folder. Raises ModelError if it has no chat template."""
    tokenizer = load_tokenizer(folder)
    if templates_of(tokenizer) is None:
        raise ModelError(
            f"draft.prompt is template, but the draft's tokenizer in {folder} has no chat template; set draft.prompt to"
            " text, or add a chat_template.jinja"
        )
    return tokenizer


class DraftPrompts:
    """Tokenizes conversations in the draft's chat template.

    Drafts never change an answer, so a conversation that the template does not support has no draft prompt, and
    drafters translate the target's prompt.
    """

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template

    @classmethod
    def load(
        cls, source: str, server: ServerConfig, *, render: Render = render_here, max_context: int
    ) -> "DraftPrompts":
        """Loads the template of a Hugging Face id or folder. Raises ModelError if there is none."""
        tokenizer = check_template(local_folder(source, with_weights=False))
        special = server.allow_special_tokens_in_text
        max_chars = max_context * max(map(len, tokenizer.get_vocab()))
        return cls(ChatTemplate(tokenizer, special_tokens_in_text=special, render=render, max_chars=max_chars))

    def tokens(self, request: ChatRequest) -> tuple[int, ...]:
        """Returns the conversation in the draft's tokens, up to the answer; empty if the template cannot render it."""
        template = self._template
        with_tools = bool(request.offered)
        has_calls = any(message.tool_calls for message in request.messages)
        if with_tools and not template.takes("tools", with_tools=True):
            return ()
        if has_calls and not template.takes("tool_calls", with_tools=with_tools):
            return ()
        try:
            return template.encode(messages_of(request, template), options_of(request))
        except (RequestError, EngineError) as error:
            log.info("drafting from the target's prompt, because the draft's template fails: %s", error)
            return ()
