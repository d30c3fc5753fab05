"""Texts to tokens and back, for clients that count. Pure; made for a thread beside the event loop."""

from dataclasses import dataclass
from typing import Any

from cluster.config import SlipstreamConfig
from cluster.errors import RequestError
from serve_app.http.conversation.chat_template import ChatTemplate
from serve_app.http.conversation.requests import messages_for, options_for
from serve_app.http.plain.served_model import check_model
from serve_app.http.wire.schemas import ChatRequest
from serve_app.http.wire.tokenizing import DetokenizeReply, DetokenizeRequest, TokenizeReply, TokenizeRequest


@dataclass(frozen=True)
class Tokenizing:
    """The served model's tokenizer, as these endpoints use it."""

    tokenizer: Any
    template: ChatTemplate
    config: SlipstreamConfig
    max_token_chars: int
    vocabulary: int  # token ids are below this

    def tokenize(self, request: TokenizeRequest) -> TokenizeReply:
        """Refuses a text that cannot fit the context, before it is tokenised."""
        self._check_model(request.model)
        context = self.config.model.max_context
        if request.chars > context * self.max_token_chars:
            field = "prompt" if request.prompt is not None else "messages"
            message = f"{field} has {request.chars} characters, expected at most {context * self.max_token_chars}: "
            raise RequestError(f"{message}the context holds {context} tokens", field)
        tokens = self._tokens(request)
        strings = tuple(self.tokenizer.convert_ids_to_tokens(list(tokens))) if request.return_token_strs else None
        return TokenizeReply(count=len(tokens), max_model_len=context, tokens=tokens, token_strs=strings)

    def detokenize(self, request: DetokenizeRequest) -> DetokenizeReply:
        """All tokens are spelled, special ones too."""
        self._check_model(request.model)
        if (highest := max(request.tokens)) >= self.vocabulary:
            raise RequestError(f"tokens: {highest} is outside the vocabulary of {self.vocabulary} tokens", "tokens")
        return DetokenizeReply(prompt=self.tokenizer.decode(list(request.tokens)))

    def _tokens(self, request: TokenizeRequest) -> tuple[int, ...]:
        if request.prompt is not None:
            special = request.add_special_tokens is not False
            return tuple(self.tokenizer(request.prompt, add_special_tokens=special).input_ids)
        if request.add_special_tokens:
            raise RequestError(
                "add_special_tokens: a chat template writes its own, expected false", "add_special_tokens"
            )
        chat = ChatRequest(
            model=self.config.model.name,
            messages=request.messages,
            tools=request.tools,
            chat_template_kwargs=request.chat_template_kwargs,
            add_generation_prompt=request.add_generation_prompt,
            continue_final_message=request.continue_final_message,
        )
        return self.template.encode(messages_for(chat, self.template), options_for(chat))

    def _check_model(self, name: str | None) -> None:
        if name is not None:
            check_model(name, self.config.served_names)
