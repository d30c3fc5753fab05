"""Tokenizers of models with various tool-call formats, and random texts under a grammar."""

import random
from collections.abc import Sequence
from typing import Any

from tokenizers import AddedToken

from actors.grammars import GrammarCompiler, grammar_vocabulary
from serve_app.api.text import TextCodec
from serve_app.api.tool_calls import find_template
from tests.talking_tokenizer import MODEL_TYPE, talking_tokenizer

_JSON_CALL = "<tool_call>{{ call.function | tojson }}</tool_call>"
_LINED_CALL = '<tool_call>\n{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n'
_TAGGED_CALL = (
    "<tool_call>\n<function={{ call.function.name }}>\n"
    "{% for key, value in call.function.arguments.items() %}"
    "<parameter={{ key }}>\n{{ value if value is string else value | tojson }}\n</parameter>\n"
    "{% endfor %}</function>\n</tool_call>"
)
_QUOTED_CALL = (
    "<tool_call>call:{{ call.function.name }}{% for key, value in call.function.arguments.items() %}"
    " {{ key }}='{{ value }}'{% endfor %}</tool_call>"
)


def json_writer() -> TextCodec:
    """Writes calls as JSON objects between plain-text markers."""
    return _codec(_JSON_CALL)


def lined_writer() -> TextCodec:
    """Writes calls as JSON objects between plain-text markers on separate lines, as most models do."""
    return _codec(_LINED_CALL + "</tool_call>\n")


def tagged_writer() -> TextCodec:
    """Writes each argument between tags."""
    return _codec(_TAGGED_CALL, "qwen3_5")


def special_writer() -> TextCodec:
    """Writes all calls in one list between special tokens."""
    call = '{{ "[CALLS][" if loop.first else ", " }}{{ call.function | tojson }}{{ "][/CALLS]" if loop.last else "" }}'
    tokenizer = talking_tokenizer()
    tokenizer.add_tokens([AddedToken("[CALLS]", special=True), AddedToken("[/CALLS]", special=True)])
    calls = {
        "open": "[CALLS]",
        "close": "[/CALLS]",
        "content": "json",
        "transform_each": True,
        "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{arguments}"}},
    }
    response = {
        "start_anchor": "<|im_start|>assistant\n",
        "fields": {"tool_calls": calls, "content": {"close": "<|im_end|>"}},
    }
    return _codec(call, response=response, tokenizer=tokenizer)


def quoting_writer() -> TextCodec:
    """Writes calls in an unsupported format."""
    return _codec(_QUOTED_CALL)


class GrammarSampler:
    """Draws texts that a grammar allows, with all allowed tokens equally likely."""

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec
        self._compiler = GrammarCompiler(grammar_vocabulary(codec.tokenizer, codec.eos_ids))

    def one(self, grammar: str, seed: int, most: int = 2000) -> str | None:
        """Returns a random text, or None if it does not end."""
        draw = random.Random(seed)
        followed = self._compiler.follow(grammar)
        tokens: list[int] = []
        for _ in range(most):
            (mask,) = followed.masks([()])
            assert mask is not None, "it goes on"
            allowed = [token for token in range(self._codec.vocabulary) if mask[token // 8] >> token % 8 & 1]
            token = draw.choice(allowed)
            if token in self._codec.eos_ids:
                return str(self._codec.tokenizer.decode(tokens))
            tokens.append(token)
            followed.advance([token])
        return None

    def takes(self, grammar: str, text: str) -> bool:
        """Returns whether the grammar allows exactly this text."""
        return self._takes(grammar, self._codec.encode(text))

    def takes_spelt(self, grammar: str, text: str, spelt: str) -> bool:
        """Returns whether the grammar allows this text with `spelt` as single characters instead of one token."""
        before, _, after = text.partition(spelt)
        encode = self._codec.encode
        letters = [token for letter in spelt for token in encode(letter)]
        return self._takes(grammar, (*encode(before), *letters, *encode(after)))

    def _takes(self, grammar: str, tokens: Sequence[int]) -> bool:
        followed = self._compiler.follow(grammar)
        for token in (*tokens, self._codec.eos_ids[0]):
            (mask,) = followed.masks([()])
            if mask is None or not mask[token // 8] >> token % 8 & 1:
                return False
            followed.advance([token])
        return True


def _codec(call: str, model_type: str = MODEL_TYPE, *, response: Any = "auto", tokenizer: Any = None) -> TextCodec:
    made = tokenizer or talking_tokenizer()
    made.chat_template = made.chat_template.replace(_JSON_CALL, call)
    return TextCodec(made, (made.eos_token_id,), find_template(response, made, model_type))
