"""Formats log probabilities for chats, completions and vLLM's `prompt_logprobs`."""

from collections.abc import Callable, Sequence

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

TokenText = Callable[[int], str]
"""Returns the text of a single token."""


@value
class ScoredToken:
    """A token with the target's scores; a prompt's first token has no score."""

    token: int
    score: TokenScore | None


def chat_logprobs(scored: Sequence[ScoredToken], top: int, text_of: TokenText) -> ChatLogprobs:
    """Returns log probabilities in the chat format, with up to `top` alternatives per token."""
    return ChatLogprobs(content=tuple([_chat_token(one.token, one.score, top, text_of) for one in scored]))


def completion_logprobs(
    scored: Sequence[ScoredToken], top: int, text_of: TokenText, offset: int = 0
) -> CompletionLogprobs:
    """Returns log probabilities in the completions format; `offset` counts the characters before the first token."""
    texts = [text_of(one.token) for one in scored]
    offsets: list[int] = []
    for text in texts:
        offsets.append(offset)
        offset += len(text)
    return CompletionLogprobs(
        text_offset=tuple(offsets),
        token_logprobs=tuple([None if one.score is None else _finite(one.score.logprob) for one in scored]),
        tokens=tuple(texts),
        top_logprobs=tuple([_top(one, top, text_of) for one in scored]),
    )


def prompt_logprobs(
    prompt: Sequence[int], scores: Sequence[TokenScore], top: int, text_of: TokenText
) -> PromptLogprobs:
    """Returns a prompt's log probabilities in vLLM's format; scores start at the second token."""
    return (None, *[_prompt_token(token, score, top, text_of) for token, score in zip(prompt[1:], scores, strict=True)])


def _chat_token(token: int, score: TokenScore | None, top: int, text_of: TokenText) -> ChatTokenLogprob:
    assert score is not None, "chat answers never echo the prompt"
    top_logprobs = [_logprob(other, logprob, text_of) for other, logprob in _top_tokens(score, top)]
    text = text_of(token)
    return ChatTokenLogprob(
        token=text,
        logprob=_finite(score.logprob),
        bytes=tuple(text.encode()),
        top_logprobs=tuple(top_logprobs),
    )


def _logprob(token: int, logprob: float, text_of: TokenText) -> TokenLogprob:
    text = text_of(token)
    return TokenLogprob(token=text, logprob=logprob, bytes=tuple(text.encode()))


def _top(one: ScoredToken, top: int, text_of: TokenText) -> dict[str, float] | None:
    """Returns log probabilities of the token and its likeliest alternatives by text; the first of equal texts wins."""
    if one.score is None:
        return None
    alternatives = {text_of(one.token): _finite(one.score.logprob)}
    for token, logprob in _top_tokens(one.score, top):
        alternatives.setdefault(text_of(token), logprob)
    return alternatives


def _prompt_token(token: int, score: TokenScore, top: int, text_of: TokenText) -> dict[int, PromptLogprob]:
    alternatives = {token: PromptLogprob(logprob=_finite(score.logprob), rank=score.rank, decoded_token=text_of(token))}
    for rank, (other, logprob) in enumerate(_top_tokens(score, top), 1):
        alternatives.setdefault(other, PromptLogprob(logprob=logprob, rank=rank, decoded_token=text_of(other)))
    return alternatives


def _top_tokens(score: TokenScore, top: int) -> list[tuple[int, float]]:
    pairs = zip(score.top_ids[:top], score.top_logprobs[:top], strict=True)
    return [(token, _finite(logprob)) for token, logprob in pairs]


def _finite(logprob: float) -> float:
    """Replaces minus infinity (forbidden tokens) and NaN (broken models), which JSON cannot represent."""
    return max(MIN_LOGPROB, logprob)
