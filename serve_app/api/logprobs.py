"""Formats log probabilities for chats, completions and vLLM's `prompt_logprobs`."""

from collections.abc import Callable, Sequence
from itertools import accumulate

from protos.frozen import value
from protos.messages import TokenScore
from serve_app.api.replies import (
    ChatLogprobs,
    ChatTokenLogprob,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TokenLogprob,
)

MIN_LOGPROB = -9999.0  # replaces minus infinity, which JSON cannot represent

TokenBytes = Callable[[int], bytes]
"""Returns the bytes of a single token, which may be part of a character."""


@value
class ScoredToken:
    """A token with the target's scores; a prompt's first token has no score."""

    token: int
    score: TokenScore | None


def chat_logprobs(scored: Sequence[ScoredToken], top: int, bytes_of: TokenBytes) -> ChatLogprobs:
    """Returns log probabilities in the chat format, with up to `top` alternatives per token."""
    return ChatLogprobs(content=tuple([_chat_token(one.token, one.score, top, bytes_of) for one in scored]))


def completion_logprobs(
    scored: Sequence[ScoredToken], top: int, bytes_of: TokenBytes, offset: int = 0
) -> CompletionLogprobs:
    """Returns log probabilities in the completions format; `offset` counts the characters before the first token."""
    tokens = [bytes_of(one.token) for one in scored]
    *offsets, _ = accumulate(map(_characters, tokens), initial=offset)
    return CompletionLogprobs(
        text_offset=tuple(offsets),
        token_logprobs=tuple([None if one.score is None else _finite(one.score.logprob) for one in scored]),
        tokens=tuple(map(token_text, tokens)),
        top_logprobs=tuple([_top(one, top, bytes_of) for one in scored]),
    )


def end_offset(scored: Sequence[ScoredToken], bytes_of: TokenBytes, offset: int) -> int:
    """Returns the offset after tokens that begin at `offset`, in characters."""
    return offset + sum(_characters(bytes_of(one.token)) for one in scored)


def prompt_logprobs(
    prompt: Sequence[int], scores: Sequence[TokenScore], top: int, bytes_of: TokenBytes
) -> PromptLogprobs:
    """Returns a prompt's log probabilities in vLLM's format; scores start at the second token."""
    return (
        None,
        *[_prompt_token(token, score, top, bytes_of) for token, score in zip(prompt[1:], scores, strict=True)],
    )


def _chat_token(token: int, score: TokenScore | None, top: int, bytes_of: TokenBytes) -> ChatTokenLogprob:
    assert score is not None, "chat answers never echo the prompt"
    top_logprobs = [_logprob(other, logprob, bytes_of) for other, logprob in _top_tokens(score, top)]
    raw = bytes_of(token)
    return ChatTokenLogprob(
        token=token_text(raw),
        logprob=_finite(score.logprob),
        bytes=tuple(raw),
        top_logprobs=tuple(top_logprobs),
    )


def _logprob(token: int, logprob: float, bytes_of: TokenBytes) -> TokenLogprob:
    raw = bytes_of(token)
    return TokenLogprob(token=token_text(raw), logprob=logprob, bytes=tuple(raw))


def _top(one: ScoredToken, top: int, bytes_of: TokenBytes) -> dict[str, float] | None:
    """Returns log probabilities of the token and its likeliest alternatives by text; the first of equal texts wins."""
    if one.score is None:
        return None
    alternatives = {token_text(bytes_of(one.token)): _finite(one.score.logprob)}
    for token, logprob in _top_tokens(one.score, top):
        alternatives.setdefault(token_text(bytes_of(token)), logprob)
    return alternatives


def _prompt_token(token: int, score: TokenScore, top: int, bytes_of: TokenBytes) -> dict[int, PromptLogprob]:
    text = token_text(bytes_of(token))
    alternatives = {token: PromptLogprob(logprob=_finite(score.logprob), rank=score.rank, decoded_token=text)}
    for rank, (other, logprob) in enumerate(_top_tokens(score, top), 1):
        text = token_text(bytes_of(other))
        alternatives.setdefault(other, PromptLogprob(logprob=logprob, rank=rank, decoded_token=text))
    return alternatives


def _top_tokens(score: TokenScore, top: int) -> list[tuple[int, float]]:
    pairs = zip(score.top_ids[:top], score.top_logprobs[:top], strict=True)
    return [(token, _finite(logprob)) for token, logprob in pairs]


def token_text(raw: bytes) -> str:
    r"""Decodes a token; writes part of a character as OpenAI does, for instance `bytes:\xf0\x9f`."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return f"bytes:{raw.decode(errors='backslashreplace')}"


def _characters(raw: bytes) -> int:
    """Returns the number of characters that begin in a token, so parts of one character count once."""
    return sum(byte & 0xC0 != 0x80 for byte in raw)  # skips continuation bytes, 10xxxxxx


def _finite(logprob: float) -> float:
    """Replaces minus infinity (forbidden tokens) and NaN (broken models), which JSON cannot represent."""
    return max(MIN_LOGPROB, logprob)
