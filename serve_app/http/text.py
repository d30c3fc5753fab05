"""Text to tokens and back: prompts, chat templates, incremental detokenisation, stop strings."""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Self

from jinja2 import TemplateError
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from cluster.errors import RequestError

_UNFINISHED = "\ufffd"  # what the bytes of half a character decode to
_MOST_TOKENS_OF_A_CHARACTER = 4  # one for each of its bytes
_SHORT_WINDOW = 8  # tokens
_LONG_WINDOW = 16
_LONGEST_WINDOW = 32  # at which linear time goes before equality; only bytes that are no text get there


class Detokenizer:
    """Text of a growing list of tokens, given out in whole characters.

    All that it gave out equals the decoding of all tokens at once, where they spell text. Each token costs the decoding
    of a bounded window, whatever the tokens are. (`tokenizers.DecodeStream` holds back all of a text that ends in
    U+FFFD, decodes it again with each token, and never gives out a tail of bytes that makes no character.)
    """

    def __init__(self, tokenizer: Tokenizer, special_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._special_ids = special_ids
        # The window begins with tokens that were given out already: some decoders treat the very first token
        # differently, for instance by dropping its leading space.
        self._window: list[int] = []
        self._given = 0  # characters of the window's text that were given out
        self._new = 0  # tokens since the text last ended in a character that is no U+FFFD
        # Characters of the window's text after each of the newest tokens. It may shrink: where single bytes are tokens,
        # an unfinished character makes U+FFFD of every byte beside it, until it is finished.
        self._lengths: deque[int] = deque(maxlen=_MOST_TOKENS_OF_A_CHARACTER)

    def push(self, token: int) -> str:
        """The text that has become final with this token."""
        if token in self._special_ids:
            return ""
        self._window.append(token)
        self._new += 1
        text = self._decode(self._window)
        self._lengths.append(len(text))
        if not text.endswith(_UNFINISHED):
            given_out = self._give(text, len(text))
            self._begin_anew()
            return given_out
        if self._new < _MOST_TOKENS_OF_A_CHARACTER:
            return ""
        given_out = self._give(text, min(self._lengths))  # the newest tokens but one may be bytes of one character
        if len(self._window) >= _LONG_WINDOW and len(self._window) % _SHORT_WINDOW == 0:
            self._narrow()
        return given_out

    def finish(self) -> str:
        """What is left when no token follows."""
        text = self._decode(self._window)
        return self._give(text, len(text))

    def preview(self, tokens: Sequence[int]) -> str:
        """What these tokens would read as if they came next; special ones by their names."""
        return self._decode([*self._window, *tokens])[self._given :]

    def _give(self, text: str, end: int) -> str:
        """The window's text up to `end`, as far as it was not given out."""
        given_out = text[self._given : end]
        self._given = max(self._given, end)
        return given_out

    def _begin_anew(self) -> None:
        """All is given out; the newest tokens stay, for the next ones to be decoded with."""
        self._window = self._window[-self._new :]
        self._given = len(self._decode(self._window))
        self._new = 0
        self._lengths.clear()

    def _narrow(self) -> None:
        """Drops the window's first tokens at a border, where both sides read alone as they do together."""
        shortest = min(range(len(self._lengths)), key=lambda age: self._lengths[-1 - age])
        end = len(self._window) - shortest  # where no character was unfinished, if there is such a place
        whole = self._decode(self._window[:end])
        starts = range(end - _SHORT_WINDOW, end - _SHORT_WINDOW + _MOST_TOKENS_OF_A_CHARACTER)
        borders = (start for start in starts if self._is_border(start, end, whole))
        start = next(borders, None if len(self._window) < _LONGEST_WINDOW else starts[0])
        if start is not None:
            self._given = len(self._decode(self._window[start:end]))
            self._window = self._window[start:]
            ends = range(len(self._window) - len(self._lengths) + 1, len(self._window) + 1)
            self._lengths.extend([len(self._decode(self._window[:end])) for end in ends])

    def _is_border(self, start: int, end: int, whole: str) -> bool:
        return self._decode(self._window[:start]) + self._decode(self._window[start:end]) == whole

    def _decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=False)


class StopMatcher:
    """Cuts a growing text before the first stop string, holding back what may be the beginning of one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""
        self.matched = False

    def push(self, text: str) -> str:
        """The text that is safe to give out now; nothing after a match."""
        if self.matched:
            return ""
        self._held += text
        found = [at for at in map(self._held.find, self._stops) if at >= 0]
        self.matched = bool(found)
        return self._release(min(found) if found else len(self._held) - self._hold())

    def finish(self) -> str:
        """What was held back, when no text follows."""
        return "" if self.matched else self._release(len(self._held))

    def _hold(self) -> int:
        """Length of the longest end of the text that begins a stop string."""
        longest = max((len(stop) - 1 for stop in self._stops), default=0)
        tails = (self._held[-length:] for length in range(min(longest, len(self._held)), 0, -1))
        return next((len(tail) for tail in tails if any(stop.startswith(tail) for stop in self._stops)), 0)

    def _release(self, count: int) -> str:
        released = self._held[:count]
        self._held = self._held[count:]
        return released


class TextCodec:
    """The served model's tokenizer, as the API uses it."""

    def __init__(self, tokenizer: Any, eos_ids: Sequence[int]) -> None:
        """`tokenizer` is a Hugging Face tokenizer that is backed by the tokenizers library."""
        self._tokenizer = tokenizer
        self.eos_ids = tuple(eos_ids)
        self.vocabulary = len(tokenizer)
        self.max_token_chars = max(map(len, tokenizer.get_vocab()))
        added = tokenizer.backend_tokenizer.get_added_tokens_decoder()
        self._special_ids = frozenset(token_id for token_id, token in added.items() if token.special)

    @classmethod
    def load(cls, model: str) -> Self:
        """The codec of a Hugging Face model id or folder."""
        return cls(AutoTokenizer.from_pretrained(model), _eos_ids(model))

    def encode(self, text: str) -> tuple[int, ...]:
        """Tokens of a prompt, with the special tokens that the model expects around it."""
        return tuple(self._tokenizer(text).input_ids)

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> tuple[int, ...]:
        """Tokens of a conversation in the model's own chat template, up to where the assistant begins."""
        if self._tokenizer.chat_template is None:
            raise RequestError("messages: this model has no chat template; use /v1/completions", "messages")
        try:
            tokens = self._tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, return_dict=False)
        except TemplateError as error:
            raise RequestError(f"messages: the model's chat template refuses them: {error}", "messages") from error
        return tuple(tokens)

    def detokenizer(self) -> Detokenizer:
        return Detokenizer(self._tokenizer.backend_tokenizer, self._special_ids)


def _eos_ids(model: str) -> tuple[int, ...]:
    """Every token id that ends a generation: several are usual, and few models without a generation config exist."""
    try:
        found = GenerationConfig.from_pretrained(model).eos_token_id
    except OSError:
        found = AutoConfig.from_pretrained(model).eos_token_id
    if found is None:
        return ()
    return tuple(found) if isinstance(found, list) else (found,)
