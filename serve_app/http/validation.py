"""From a request to the sessions that it asks for, with all parameters resolved.

Pure: randomness comes in as a function. Every refusal is a RequestError that names the field.
Knows nothing of HTTP.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cluster.config import SlipstreamConfig
from cluster.errors import RequestError
from cluster.routing.ledger import Generation
from protos.messages import Acceptance, Sampling
from serve_app.http.plain.served_model import check_model
from serve_app.http.request_rules import check_rules, rules_of, scoring_of
from serve_app.http.structured.response_format import AskedGrammar, asked_grammar, check_end
from serve_app.http.wire.schemas import GenerationRequest

Draw = Callable[[], int]
"""Gives 64 random bits."""

TOO_LONG = "context_length_exceeded"
_SEED_MASK = (1 << 64) - 1  # a negative seed is the unsigned one of the same bits


@dataclass(frozen=True, slots=True)
class Terms:
    """What can be said of a request before its prompts are tokens."""

    sessions: int
    acceptance: Acceptance
    max_draft_tokens: int
    sampling: Sampling
    grammar: AskedGrammar | None


def agree(request: GenerationRequest, *, config: SlipstreamConfig, max_token_chars: int) -> Terms:
    """The terms of a request; refuses all that needs no tokenising to be refused.

    `max_token_chars` is the length of the vocabulary's longest token.
    """
    check_model(request.model, config.served_names)
    _check_count(request, min(config.server.max_request_sessions, config.server.max_requests))
    _check_limits(request, config.model.max_context)
    _check_text(request, config.model.max_context, max_token_chars)
    check_rules(request)
    return Terms(
        sessions=request.prompt_count * request.n,
        acceptance=_acceptance(request, config),
        max_draft_tokens=_max_draft_tokens(request, config),
        sampling=_sampling(request),
        grammar=_grammar(request),
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
    bad_words: tuple[tuple[int, ...], ...] = (),
    traceparent: str = "",
) -> list[Generation]:
    """The sessions to run: `n` for each prompt, in the order of the answer's choices."""
    generations = []
    for prompt in prompts:
        _check_prompt(request, prompt, vocabulary)
        prompt_len = len(prompt)
        max_len = _max_len(request, prompt_len, context)
        rules = rules_of(request, prompt_len, bad_words, vocabulary)
        scoring = scoring_of(request, prompt_len)
        seed = draw() if request.seed is None else request.seed & _SEED_MASK
        generations += [
            Generation(
                session=f"{draw():016x}{draw():016x}",
                prompt=prompt,
                max_len=max_len,
                stop_ids=_stop_ids(request, eos_ids),
                sampling=terms.sampling,
                seed=seed,
                draft_seed=draw(),
                choice=choice,
                hash_key=draw(),
                acceptance=terms.acceptance,
                max_draft_tokens=terms.max_draft_tokens,
                grammar=terms.grammar.text if terms.grammar is not None else "",
                rules=rules,
                scoring=scoring,
                priority=request.priority,
                cache_salt=request.cache_salt or "",
                wants_rejected=request.speculation.rejected,
                traceparent=traceparent,
            )
            for choice in range(request.n)
        ]
    return generations


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
            raise RequestError(message, field, TOO_LONG)


def _check_text(request: GenerationRequest, context: int, max_token_chars: int) -> None:
    """Refuses text that cannot be few enough tokens, however they fall."""
    most = context * max_token_chars
    if request.prompt_chars > most:
        field = request.prompt_field
        message = f"{field} has {request.prompt_chars} characters, expected at most {most}: "
        message += f"the context holds {context} tokens of up to {max_token_chars}"
        raise RequestError(message, field, TOO_LONG)


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
        message += f"the context of {context} must hold the answer too"
        raise RequestError(message, request.prompt_field, TOO_LONG)
    for field, limit in request.token_limits.items():
        if limit > room:
            message = f"{field} is {limit}, expected at most {room}: the context holds {context} tokens"
            raise RequestError(f"{message} and the prompt has {prompt_len}", field, TOO_LONG)
    default = room if request.default_max_tokens is None else min(room, request.default_max_tokens)
    return prompt_len + min(request.token_limits.values(), default=default)


def _grammar(request: GenerationRequest) -> AskedGrammar | None:
    asked = asked_grammar(request.answer_format, request.structured_outputs)
    check_end(asked, ignore_eos=request.ignore_eos)
    return asked


def _stop_ids(request: GenerationRequest, eos_ids: tuple[int, ...]) -> tuple[int, ...]:
    """Each once."""
    return tuple(dict.fromkeys((*(() if request.ignore_eos else eos_ids), *request.stop_token_ids)))


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
        repetition_penalty=request.repetition_penalty,
    )
