"""From a request to the sessions that it asks for, with all parameters resolved.

Pure: randomness comes in as a function. Every refusal is a RequestError that names the field.
Knows nothing of HTTP.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cluster.config import SlipstreamConfig
from cluster.errors import RequestError
from cluster.routing.session import Generation
from protos.messages import Acceptance, Sampling
from serve_app.http.wire.schemas import GenerationRequest

Draw = Callable[[], int]
"""Gives 64 random bits."""

_SEED_MASK = (1 << 64) - 1


class UnknownModelError(RequestError):
    """The request names a model that is not served here."""


@dataclass(frozen=True, slots=True)
class Terms:
    """What can be said of a request before its prompts are tokens."""

    sessions: int
    acceptance: Acceptance
    max_draft_tokens: int
    sampling: Sampling


def agree(request: GenerationRequest, *, config: SlipstreamConfig, max_token_chars: int) -> Terms:
    """The terms of a request; refuses all that needs no tokenising to be refused.

    `max_token_chars` is the length of the vocabulary's longest token.
    """
    _check_model(request, config)
    _check_count(request, min(config.server.max_request_sessions, config.server.max_requests))
    _check_limits(request, config.model.max_context)
    _check_text(request, config.model.max_context, max_token_chars)
    return Terms(
        sessions=request.prompt_count * request.n,
        acceptance=_acceptance(request, config),
        max_draft_tokens=_max_draft_tokens(request, config),
        sampling=_sampling(request),
    )


def resolve(
    request: GenerationRequest,
    terms: Terms,
    prompts: Sequence[tuple[int, ...]],
    *,
    context: int,
    eos_ids: tuple[int, ...],
    vocabulary: int,
    draw: Draw,
    traceparent: str = "",
) -> list[Generation]:
    """The sessions to run: `n` for each prompt, in the order of the answer's choices."""
    generations = []
    for prompt in prompts:
        _check_prompt(request, prompt, vocabulary)
        max_len = _max_len(request, len(prompt), context)
        seed = draw() if request.seed is None else request.seed & _SEED_MASK
        generations += [
            Generation(
                session=f"{draw():016x}{draw():016x}",
                prompt=prompt,
                max_len=max_len,
                stop_ids=() if request.ignore_eos else eos_ids,
                sampling=terms.sampling,
                seed=seed,
                draft_seed=draw(),
                choice=choice,
                hash_key=draw(),
                acceptance=terms.acceptance,
                max_draft_tokens=terms.max_draft_tokens,
                traceparent=traceparent,
            )
            for choice in range(request.n)
        ]
    return generations


def _check_model(request: GenerationRequest, config: SlipstreamConfig) -> None:
    if request.model != config.model.name:
        raise UnknownModelError(f"model '{request.model}' does not exist; '{config.model.name}' is served", "model")


def _check_count(request: GenerationRequest, most: int) -> None:
    count = request.prompt_count
    if count * request.n > most:
        field = request.prompt_field if count > most else "n"
        asked = f"{field}: {count} prompts with n = {request.n}"
        raise RequestError(f"{asked} are more than the {most} sessions that one request may have", field)


def _check_limits(request: GenerationRequest, context: int) -> None:
    """Refuses what no prompt leaves room for."""
    for field, limit in request.token_limits.items():
        if limit >= context:
            message = f"{field} is {limit}, expected less than {context}: the context holds the prompt too"
            raise RequestError(message, field)


def _check_text(request: GenerationRequest, context: int, max_token_chars: int) -> None:
    """Refuses text that cannot be few enough tokens, however they fall."""
    most = context * max_token_chars
    if request.prompt_chars > most:
        field = request.prompt_field
        message = f"{field} has {request.prompt_chars} characters, expected at most {most}: "
        raise RequestError(f"{message}the context holds {context} tokens of up to {max_token_chars}", field)


def _check_prompt(request: GenerationRequest, prompt: tuple[int, ...], vocabulary: int) -> None:
    field = request.prompt_field
    if not prompt:
        raise RequestError(f"{field} is empty; expected at least one token", field)
    if max(prompt) >= vocabulary:
        raise RequestError(f"{field}: token id {max(prompt)} is outside the vocabulary of {vocabulary} tokens", field)


def _max_len(request: GenerationRequest, prompt_len: int, context: int) -> int:
    room = context - prompt_len
    if room < 1:
        message = f"{request.prompt_field} has {prompt_len} tokens, expected at most {context - 1}: "
        raise RequestError(f"{message}the context of {context} must hold the answer too", request.prompt_field)
    for field, limit in request.token_limits.items():
        if limit > room:
            message = f"{field} is {limit}, expected at most {room}: the context holds {context} tokens"
            raise RequestError(f"{message} and the prompt has {prompt_len}", field)
    default = room if request.default_max_tokens is None else min(room, request.default_max_tokens)
    return prompt_len + min(request.token_limits.values(), default=default)


def _acceptance(request: GenerationRequest, config: SlipstreamConfig) -> Acceptance:
    asked = request.speculation.acceptance
    if request.seed is not None and asked == "ratio":
        message = (
            "speculation.acceptance is ratio, expected coupled: with a seed the answer must not depend on the draft"
        )
        raise RequestError(message, "speculation.acceptance")
    if request.seed is not None:
        return Acceptance.COUPLED
    return Acceptance[(asked or config.speculation.acceptance).upper()]


def _max_draft_tokens(request: GenerationRequest, config: SlipstreamConfig) -> int:
    asked = request.speculation.max_draft_tokens
    most = config.speculation.max_draft_tokens
    if asked is None:
        return most
    if asked > most:
        field = "speculation.max_draft_tokens"
        raise RequestError(f"{field} is {asked}, expected at most {most}, which this server is configured for", field)
    return asked


def _sampling(request: GenerationRequest) -> Sampling:
    return Sampling(
        temperature=request.temperature,
        top_k=max(request.top_k, 0),
        top_p=request.top_p,
        min_p=request.min_p,
        frequency_penalty=request.frequency_penalty,
        presence_penalty=request.presence_penalty,
    )
