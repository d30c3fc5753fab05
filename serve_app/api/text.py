"""Tokenizes prompts, detokenizes answers incrementally, and finds stop strings."""

import logging
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

from llguidance import LLTokenizer
from tokenizers import Tokenizer
from transformers.utils.chat_parsing.response_templates import ResponseTemplate

from actors.grammars import GrammarCompiler, grammar_vocabulary, grammars_of
from actors.models.checkpoint import extra_tokens, vocabulary
from actors.models.config_reader import read_config
from actors.models.tokenizer_reader import end_of_text, id_limit, load_tokenizer
from cluster.config import ServerConfig
from cluster.errors import ModelError
from serve_app.api.chat_template import MAX_CHARS, ChatTemplate, Message, Render, TemplateOptions, render_here
from serve_app.api.tool_calls import AnswerForm, CallForm, ResponseReaders, find_answer_form, find_template

log = logging.getLogger("ray.serve")

_UNFINISHED = "\ufffd"  # decoded text of an incomplete character
_MAX_TOKENS_PER_CHARACTER = 4  # a character has at most 4 bytes, each decoded to one U+FFFD
_SHORT_WINDOW = 8  # window lengths in tokens
_LONG_WINDOW = 16
_LONGEST_WINDOW = 32  # longer windows trade exact equality for linear time; only invalid bytes reach this length


class Detokenizer:
    """Incremental decoder that only releases complete characters.

    For valid text, the output equals that of decoding all tokens at once. Each token decodes a window of bounded
    length. (`tokenizers.DecodeStream` holds back all text that ends in U+FFFD, decodes it again with each token, and
    never releases trailing bytes that form no character.)
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        special_ids: frozenset[int],
        joined_ids: frozenset[int] = frozenset(),
        prompt: Sequence[int] = (),
    ) -> None:
        """Omits the text of `special_ids`; adds no space between adjacent `joined_ids`.

        Decodes the text as the continuation of `prompt`, which is not released.
        """
        self._tokenizer = tokenizer
        self._special_ids = special_ids
        self._joined_ids = joined_ids
        # The window starts with released tokens, since some decoders treat the very first token
        # differently, for instance by dropping its leading space.
        self._window = self._context(prompt)
        self._released = len(self._decode(self._window))  # characters of the window's text already released
        self._new = 0  # tokens since the text last ended in a complete character
        # Length of the window's text after each of the newest tokens. It may shrink: with byte tokens, an
        # unfinished character turns adjacent bytes into U+FFFD until it is complete.
        self._lengths: deque[int] = deque(maxlen=_MAX_TOKENS_PER_CHARACTER)

    def _context(self, prompt: Sequence[int]) -> list[int]:
        """Returns the last tokens of the prompt, cut at a whole character; none if the prompt ends within one."""
        last = [token for token in prompt[-_SHORT_WINDOW:] if token not in self._special_ids]
        ends = (last[start:] for start in range(len(last)))
        return next((end for end in ends if _UNFINISHED not in self._decode(end)), [])

    def push(self, token: int) -> str:
        """Adds a token and returns newly final text."""
        return self.extend((token,))

    def extend(self, tokens: Sequence[int]) -> str:
        """Adds tokens and returns newly final text, with one decoding if the text then ends in a complete character."""
        tokens = [token for token in tokens if token not in self._special_ids]
        if len(tokens) > 1:
            text = self._decode([*self._window, *tokens])
            if not text.endswith(_UNFINISHED):
                self._window += tokens
                self._new += len(tokens)
                return self._complete(text)
        return "".join([self._add(token) for token in tokens])

    def _add(self, token: int) -> str:
        self._window.append(token)
        self._new += 1
        text = self._decode(self._window)
        if not text.endswith(_UNFINISHED):
            return self._complete(text)
        self._lengths.append(len(text))
        if self._new < _MAX_TOKENS_PER_CHARACTER:
            return ""
        released = self._release_until(
            text, min(self._lengths)
        )  # the newest tokens may still be parts of one character
        if len(self._window) >= _LONG_WINDOW and len(self._window) % _SHORT_WINDOW == 0:
            self._narrow()
        return released

    def finish(self) -> str:
        """Returns the held-back text."""
        text = self._decode(self._window)
        return self._release_until(text, len(text))

    def preview(self, tokens: Sequence[int]) -> str:
        """Returns the text that `tokens` would add next, including special tokens."""
        return self._decode([*self._window, *tokens])[self._released :]

    def _release_until(self, text: str, end: int) -> str:
        """Returns the window's unreleased text up to `end`."""
        released = text[self._released : end]
        self._released = max(self._released, end)
        return released

    def _complete(self, text: str) -> str:
        """Releases the window's text, which ends in a complete character, and keeps tokens as context for the next."""
        released = self._release_until(text, len(text))
        self._released = len(text)
        if len(self._window) >= _SHORT_WINDOW:
            self._window = self._window[-self._new :]
            self._released = len(self._decode(self._window))
        self._new = 0
        self._lengths.clear()
        return released

    def _narrow(self) -> None:
        """Drops tokens from the window's start if the two parts, decoded separately, give the same text."""
        shortest = min(range(len(self._lengths)), key=lambda age: self._lengths[-1 - age])
        end = len(self._window) - shortest  # after a complete character, if possible
        whole = self._decode(self._window[:end])
        starts = range(end - _SHORT_WINDOW, end - _SHORT_WINDOW + _MAX_TOKENS_PER_CHARACTER)
        splits = (start for start in starts if self._can_split(start, end, whole))
        start = next(splits, None if len(self._window) < _LONGEST_WINDOW else starts[0])
        if start is not None:
            self._released = len(self._decode(self._window[start:end]))
            self._window = self._window[start:]
            ends = range(len(self._window) - len(self._lengths) + 1, len(self._window) + 1)
            self._lengths.extend([len(self._decode(self._window[:end])) for end in ends])

    def _can_split(self, start: int, end: int, whole: str) -> bool:
        return self._decode(self._window[:start]) + self._decode(self._window[start:end]) == whole

    def _decode(self, tokens: list[int]) -> str:
        if self._joined_ids.isdisjoint(tokens):
            return self._tokenizer.decode(tokens, skip_special_tokens=False)
        starts = [n for n in range(1, len(tokens)) if self._joined_ids.issuperset(tokens[n - 1 : n + 1])]
        parts = [tokens[start:end] for start, end in pairwise((0, *starts, len(tokens)))]
        return "".join(self._tokenizer.decode(part, skip_special_tokens=False) for part in parts)


class StopMatcher:
    """Cuts growing text at the first complete stop string; holds back text that may begin one.

    The result is independent of the split into pieces. If several stop strings end at the same character, the longest
    wins.
    """

    def __init__(self, stops: Sequence[str], keeps_stop: bool = False) -> None:
        """With `keeps_stop`, the matched stop string is released too."""
        # Sorted, without strings that begin with another stop string, since that one always ends first.
        self._stops: list[str] = []
        for stop in sorted(set(stops)):
            if not self._stops or not stop.startswith(self._stops[-1]):
                self._stops.append(stop)
        self._longest = max(map(len, self._stops), default=0)
        self._firsts = frozenset(stop[0] for stop in self._stops)
        self._keeps_stop = keeps_stop
        self._held = ""
        self._starts: list[int] = []  # ascending positions in `_held` at which a stop string may begin
        self.match: str | None = None  # first completed stop string

    @property
    def matched(self) -> bool:
        return self.match is not None

    def push(self, text: str) -> str:
        """Returns the text that can be released; empty after a match."""
        if self.matched:
            return ""
        if not self._starts and self._firsts.isdisjoint(text):
            return text
        begin = len(self._held)
        self._held += text
        self._starts += [begin + at for at, char in enumerate(text) if char in self._firsts]
        if (first := self._first_match()) is not None:
            start, self.match = first
            return self._release(start + len(self.match) if self._keeps_stop else start)
        return self._release(self._starts[0] if self._starts else len(self._held))

    def finish(self) -> str:
        """Returns the held-back text."""
        return "" if self.matched else self._release(len(self._held))

    def _first_match(self) -> tuple[int, str] | None:
        """Returns the start and text of the stop string that ends first; drops starts that cannot become one."""
        first: tuple[int, str] | None = None
        first_end = len(self._held) + 1
        left: list[int] = []
        for start in self._starts:
            tail = self._held[start : start + self._longest]
            following = bisect_right(self._stops, tail)
            if following and tail.startswith(stop := self._stops[following - 1]):
                if start + len(stop) < first_end:
                    first = (start, stop)
                    first_end = start + len(stop)
            elif following < len(self._stops) and self._stops[following].startswith(tail):
                left.append(start)
        self._starts = left
        return first

    def _release(self, count: int) -> str:
        released = self._held[:count]
        self._held = self._held[count:]
        self._starts = [start - count for start in self._starts]
        return released


class TextCodec:
    """Tokenizer of the served model, with its chat and response templates."""

    def __init__(
        self,
        tokenizer: Any,
        eos_ids: Sequence[int],
        response_template: ResponseTemplate | None = None,
        *,
        special_tokens_in_text: bool = False,
        vocabulary: int | None = None,
        render: Render = render_here,
        max_context: int | None = None,
    ) -> None:
        """Takes a Hugging Face tokenizer backed by the tokenizers library.

        Token ids must be below `vocabulary`, by default the tokenizer's own limit. `render` renders chat templates,
        with at most the characters that `max_context` tokens can spell.
        """
        self.tokenizer = tokenizer
        self.eos_ids = tuple(eos_ids)
        self.vocabulary = vocabulary or id_limit(tokenizer)
        self.max_token_chars = max(map(len, tokenizer.get_vocab()))
        self.template = ChatTemplate(
            tokenizer,
            special_tokens_in_text=special_tokens_in_text,
            render=render,
            max_chars=MAX_CHARS if max_context is None else max_context * self.max_token_chars,
        )
        self.readers = ResponseReaders(tokenizer, response_template)
        added = tokenizer.backend_tokenizer.get_added_tokens_decoder()
        self._special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._added = {token.content: token_id for token_id, token in added.items()}

    @classmethod
    def load(
        cls,
        folder: Path,
        server: ServerConfig | None = None,
        *,
        render: Render = render_here,
        max_context: int | None = None,
    ) -> Self:
        """Loads a checkpoint's codec. Raises ModelError if it has no supported tokenizer."""
        options = server or ServerConfig()
        tokenizer = load_tokenizer(folder)
        response = find_template(options.response_template, tokenizer, read_config(folder).model_type)
        special = options.allow_special_tokens_in_text
        ends = end_of_text(folder)
        log.info("%s", ends)
        if warning := extra_tokens(folder):
            log.warning("%s", warning)
        return cls(
            tokenizer,
            ends.ids,
            response,
            special_tokens_in_text=special,
            vocabulary=max(vocabulary(folder)) + 1,
            render=render,
            max_context=max_context,
        )

    def encode(self, text: str) -> tuple[int, ...]:
        """Tokenizes a prompt, and adds the special tokens that the model expects."""
        return tuple(self.tokenizer(text).input_ids)

    def encode_plain(self, text: str) -> tuple[int, ...]:
        """Tokenizes a text without special tokens."""
        return tuple(self.tokenizer(text, add_special_tokens=False).input_ids)

    @cached_property
    def token_bytes(self) -> Callable[[int], bytes]:
        """Maps a token to its bytes, which may be part of a character.

        Without a byte vocabulary, these are the bytes of its text.
        """
        try:
            vocabulary = self._grammar_vocabulary
        except ModelError:
            return lambda token: self.decode((token,), skips_special=False).encode()
        return lambda token: vocabulary.decode_bytes([token])

    def decode(self, tokens: Sequence[int], skips_special: bool = True) -> str:
        """Returns the text of all tokens at once."""
        return str(self.tokenizer.backend_tokenizer.decode(list(tokens), skip_special_tokens=skips_special))

    def encode_chat(self, messages: Sequence[Message], options: TemplateOptions | None = None) -> tuple[int, ...]:
        """Tokenizes a conversation in the model's chat template, up to the start of the answer."""
        return self.template.encode(messages, options or TemplateOptions())

    def grammars(self) -> GrammarCompiler | None:
        """Returns a grammar compiler, or None if the tokenizer's output cannot be constrained."""
        return grammars_of(lambda: self._grammar_vocabulary)

    @property
    def call_form(self) -> CallForm | None:
        """Returns the model's call format, or None if a grammar cannot express it."""
        return self.answer_form if isinstance(self.answer_form, CallForm) else None

    @cached_property
    def answer_form(self) -> AnswerForm | None:
        """Returns the markers of the model's answers, or None if its output cannot be constrained."""
        try:
            is_special = self._grammar_vocabulary.is_special_token
        except ModelError:
            return None
        special = {
            text: token for text, token in self._added.items() if is_special(token) and token not in self.eos_ids
        }
        return find_answer_form(self.template, self.readers, special)

    @cached_property
    def _grammar_vocabulary(self) -> LLTokenizer:
        return grammar_vocabulary(self.tokenizer, self.eos_ids)

    def detokenizer(
        self, skips_special: bool = True, spaces_special: bool = True, prompt: Sequence[int] = ()
    ) -> Detokenizer:
        """Returns a detokenizer for one answer, which keeps special tokens that a reader splits the answer by.

        Without `spaces_special`, it omits the space that some decoders put between added tokens. An answer that
        continues the text of `prompt` keeps its first space, which decoders drop at the start of a text.
        """
        skipped = self._special_ids if skips_special else frozenset()
        joined = frozenset[int]() if spaces_special else frozenset(self._added.values())
        return Detokenizer(self.tokenizer.backend_tokenizer, skipped, joined, prompt)
