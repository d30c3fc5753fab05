"""What a request asks for by token: which may come, how they are scored, how much of a prompt is kept.

Pure. Every refusal names the field.
"""

from collections.abc import Iterator, Sequence

from cluster.errors import RequestError
from protos.messages import TokenRules
from protos.scores import Scoring
from serve_app.http.text import TextCodec
from serve_app.http.wire.schemas import GenerationRequest

MAX_PROMPT_NUMBERS = 1 << 20  # that are told of one prompt: its tokens, times those told of each, in one message


def check_rules(request: GenerationRequest) -> None:
    """Refuses what contradicts itself, before anything is tokenised."""
    for field, limit in request.token_limits.items():
        if request.min_tokens > limit:
            raise RequestError(f"min_tokens is {request.min_tokens}, expected at most {field}, {limit}", "min_tokens")
    if request.prompt_logprobs is not None and request.stream:
        raise RequestError("prompt_logprobs: this is only allowed when stream is false", "prompt_logprobs")


def rules_of(
    request: GenerationRequest, prompt_len: int, bad_words: tuple[tuple[int, ...], ...], vocabulary: int
) -> TokenRules:
    """For a prompt of so many tokens."""
    words = max(map(max, bad_words), default=0)
    for field, token in (*_named(request), ("bad_words", words)):
        if token >= vocabulary:
            raise RequestError(f"{field}: token id {token} is outside the vocabulary of {vocabulary} tokens", field)
    return TokenRules(
        logit_bias=tuple(request.logit_bias.items()),
        allowed=tuple(sorted(set(request.allowed_token_ids))),
        bad_words=bad_words,
        min_len=prompt_len + request.min_tokens if request.min_tokens else 0,
    )


def scoring_of(request: GenerationRequest, prompt_len: int) -> Scoring:
    """What is to be told of tokens, for a prompt of so many."""
    scoring = Scoring(request.top_of_tokens, request.top_of_prompt)
    numbers = prompt_len * (scoring.prompt_top + 1) if scoring.prompt_top is not None else 0
    if numbers > MAX_PROMPT_NUMBERS:
        field = "prompt_logprobs" if request.prompt_logprobs is not None else "echo"
        message = f"{field}: {numbers} log probabilities of a prompt of {prompt_len} tokens are asked for, expected at"
        raise RequestError(f"{message} most {MAX_PROMPT_NUMBERS}", field)
    return scoring


def bad_words_of(request: GenerationRequest, text: TextCodec) -> tuple[tuple[int, ...], ...]:
    """Each word as it begins a text, and as it follows a space; both as tokens."""
    found: dict[tuple[int, ...], None] = {}
    for word in request.bad_words:
        forms = [tokens for form in (word, f" {word.lstrip()}") if (tokens := text.encode_plain(form))]
        if not forms:
            raise RequestError(f"bad_words: {word!r} has no tokens", "bad_words")
        found |= dict.fromkeys(forms)
    return tuple(found)


def truncated(request: GenerationRequest, prompt: tuple[int, ...], context: int) -> tuple[int, ...]:
    """What is kept of a prompt: by default its end."""
    kept = request.truncate_prompt_tokens
    if kept is None:
        return prompt
    if kept < 0:
        kept = max(1, context - min(request.token_limits.values(), default=1))
    return prompt[:kept] if request.truncation_side == "right" else prompt[-kept:]


def _named(request: GenerationRequest) -> Iterator[tuple[str, int]]:
    """The highest token id of each field that names some."""
    fields: dict[str, Sequence[int]] = {
        "logit_bias": list(request.logit_bias),
        "allowed_token_ids": request.allowed_token_ids,
        "stop_token_ids": request.stop_token_ids,
    }
    return ((field, max(tokens)) for field, tokens in fields.items() if tokens)
