"""From a request's bytes to the sessions that it asks for, with all parameters resolved.

Pure: randomness comes in as a function. Every refusal is a RequestError that names the field.
Knows nothing of HTTP.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

from pydantic import ValidationError
from pydantic_core import from_json

from cluster.config import SlipstreamConfig
from cluster.errors import RequestError
from cluster.routing.session import Generation
from protos.messages import Acceptance, Sampling
from serve_app.http.wire.schemas import GenerationRequest

Draw = Callable[[], int]
"""Gives 64 random bits."""

RequestT = TypeVar("RequestT", bound=GenerationRequest)

_SEED_MASK = (1 << 64) - 1


class UnknownModelError(RequestError):
    """The request names a model that is not served here."""


def parse(schema: type[RequestT], body: bytes) -> RequestT:
    """The request in a JSON body."""
    try:
        data = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise RequestError(f"the body is not JSON in UTF-8: {error}") from error
    try:
        return schema.model_validate(data)
    except ValidationError as error:
        faults = [(_path(fault["loc"]), fault["msg"]) for fault in error.errors()]
        message = "; ".join(f"{path or 'body'}: {fault}" for path, fault in faults)
        raise RequestError(message, faults[0][0] or None) from error


def resolve(
    request: GenerationRequest,
    prompts: Sequence[tuple[int, ...]],
    *,
    config: SlipstreamConfig,
    eos_ids: tuple[int, ...],
    vocabulary: int,
    draw: Draw,
) -> list[Generation]:
    """The sessions to run: `n` for each prompt, in the order of the answer's choices."""
    _check_model(request, config)
    _check_count(request, prompts, config.server.max_requests)
    acceptance = _acceptance(request, config)
    max_draft_tokens = _max_draft_tokens(request, config)
    generations = []
    for prompt in prompts:
        _check_prompt(request, prompt, vocabulary)
        max_len = _max_len(request, len(prompt), config.model.max_context)
        seed = draw() if request.seed is None else request.seed & _SEED_MASK
        generations += [
            Generation(
                session=f"{draw():016x}{draw():016x}",
                prompt=prompt,
                max_len=max_len,
                stop_ids=() if request.ignore_eos else eos_ids,
                sampling=_sampling(request),
                seed=seed,
                draft_seed=draw(),
                choice=choice,
                hash_key=draw(),
                acceptance=acceptance,
                max_draft_tokens=max_draft_tokens,
            )
            for choice in range(request.n)
        ]
    return generations


def _path(location: tuple[int | str, ...]) -> str:
    """`("messages", 0, "content")` as `messages[0].content`."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location).removeprefix(".")


def _check_model(request: GenerationRequest, config: SlipstreamConfig) -> None:
    if request.model != config.model.name:
        raise UnknownModelError(f"model '{request.model}' does not exist; '{config.model.name}' is served", "model")


def _check_count(request: GenerationRequest, prompts: Sequence[object], most: int) -> None:
    if len(prompts) * request.n > most:
        asked = f"{len(prompts)} prompts with n = {request.n}"
        raise RequestError(f"{asked} are more than the {most} sessions that this server runs at once", "n")


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
