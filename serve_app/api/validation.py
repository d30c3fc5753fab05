"""Checks a request against the model and the server's limits, and resolves it into sessions.

`check_request` needs no tokens, so most invalid requests are refused before tokenizing. `resolve` returns the sessions
with every parameter set. Both are pure: randomness is passed in as a function. Every refusal is a RequestError that
names the field. Omitted parameters come from the checkpoint's `generation_config.json`.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from transformers import GenerationConfig

from cluster.config import LearningOptions, SlipstreamConfig
from cluster.errors import INVALID_VALUE, ConfigError, RequestError
from cluster.learning import Source, may_learn
from cluster.routing.ledger import Generation
from protos.from_pb import REPETITION_PENALTIES
from protos.messages import Acceptance, Sampling, Scoring, TokenRules
from serve_app.api.request_schemas import GenerationRequest
from serve_app.api.text import TextCodec

MAX_PROMPT_NUMBERS = 1 << 20  # scores (tokens times alternatives) of the prompts of all sessions in one answer


def check_rules(request: GenerationRequest) -> None:
    """Raises RequestError for contradictory fields; called before tokenizing."""
    for field, limit in request.token_limits.items():
        if request.min_tokens > limit:
            raise RequestError(f"min_tokens is {request.min_tokens}, expected at most {field}, {limit}", "min_tokens")
    if request.prompt_logprobs is not None and request.stream:
        raise RequestError("prompt_logprobs: this is only allowed when stream is false", "prompt_logprobs")


def rules_of(
    request: GenerationRequest, prompt_len: int, bad_words: tuple[tuple[int, ...], ...], vocabulary: int
) -> TokenRules:
    """Returns the token rules for a prompt of `prompt_len` tokens; raises RequestError for unknown token ids."""
    words = max(map(max, bad_words), default=0)
    for field, token in (*_highest_ids(request), ("bad_words", words)):
        if token >= vocabulary:
            raise RequestError(f"{field}: token id {token} is outside the vocabulary of {vocabulary} tokens", field)
    return TokenRules(
        logit_bias=tuple(request.logit_bias.items()),
        allowed=tuple(sorted(set(request.allowed_token_ids))),
        bad_words=bad_words,
        min_len=prompt_len + request.min_tokens if request.min_tokens else 0,
    )


def scoring_of(request: GenerationRequest, prompt_tokens: int) -> Scoring:
    """Returns the tokens to score, for sessions with `prompt_tokens` prompt tokens in total."""
    scoring = Scoring(request.top_of_tokens, request.top_of_prompt)
    numbers = prompt_tokens * (scoring.prompt_top + 1) if scoring.prompt_top is not None else 0
    if numbers > MAX_PROMPT_NUMBERS:
        field = "prompt_logprobs" if request.prompt_logprobs is not None else "echo"
        message = f"{field} asks for {numbers} log probabilities of {prompt_tokens} prompt tokens over all choices,"
        raise RequestError(f"{message} expected at most {MAX_PROMPT_NUMBERS}", field, INVALID_VALUE)
    return scoring


def bad_words_of(request: GenerationRequest, text: TextCodec) -> tuple[tuple[int, ...], ...]:
    """Tokenizes each word twice: as the start of a text, and after a space."""
    sequences: dict[tuple[int, ...], None] = {}
    for word in request.bad_words:
        forms = [tokens for form in (word, f" {word.lstrip()}") if (tokens := text.encode_plain(form))]
        if not forms:
            raise RequestError(f"bad_words: {word!r} has no tokens", "bad_words")
        sequences |= dict.fromkeys(forms)
    return tuple(sequences)


def truncated(request: GenerationRequest, prompt: tuple[int, ...], context: int) -> tuple[int, ...]:
    """Truncates a prompt if requested; keeps its end by default."""
    length = request.truncate_prompt_tokens
    if length is None:
        return prompt
    if length < 0:
        length = max(1, context - min(request.token_limits.values(), default=1))
    return prompt[:length] if request.truncation_side == "right" else prompt[-length:]


def _highest_ids(request: GenerationRequest) -> Iterator[tuple[str, int]]:
    """Returns the highest token id in each field that contains token ids."""
    fields: dict[str, Sequence[int]] = {
        "logit_bias": list(request.logit_bias),
        "allowed_token_ids": request.allowed_token_ids,
        "stop_token_ids": request.stop_token_ids,
    }
    return ((field, max(tokens)) for field, tokens in fields.items() if tokens)


RequestT = TypeVar("RequestT", bound=BaseModel)


class GenerationDefaults(BaseModel):
    """Default sampling parameters; None where the checkpoint sets none."""

    model_config = ConfigDict(frozen=True)

    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=REPETITION_PENALTIES[0], le=REPETITION_PENALTIES[1])] | None = None

    def applied(self, request: RequestT) -> RequestT:
        """Returns the request with omitted parameters filled in."""
        defaults = self.model_dump(exclude_none=True)
        missing = {name: value for name, value in defaults.items() if name not in request.model_fields_set}
        return request.model_copy(update=missing) if missing else request


NO_DEFAULTS = GenerationDefaults()


def load_defaults(model: str) -> GenerationDefaults:
    """Reads a model's defaults; empty if its checkpoint has no `generation_config.json`."""
    try:
        config = GenerationConfig.from_pretrained(model).to_diff_dict()
    except OSError:
        return NO_DEFAULTS
    try:
        return GenerationDefaults.model_validate({name: config.get(name) for name in GenerationDefaults.model_fields})
    except ValidationError as error:
        raise ConfigError(
            f"generation_config.json of {model} has invalid parameters: {error}; correct it, or set"
            " server.generation_defaults to none"
        ) from error


Draw = Callable[[], int]
"""Returns 64 random bits."""

TOO_LONG = "context_length_exceeded"
_SEED_MASK = (1 << 64) - 1  # maps a negative seed to the unsigned seed with the same bits


def check_request(
    request: GenerationRequest, *, config: SlipstreamConfig, max_token_chars: int, drafts_are_translated: bool = False
) -> None:
    """Raises RequestError for faults that can be found before tokenizing.

    `max_token_chars` is the length of the vocabulary's longest token. With `drafts_are_translated`, the draft has
    another tokenizer than the target, which excludes rejection sampling.
    """
    _check_count(request, min(config.server.max_request_sessions, config.server.max_requests))
    _check_limits(request, config.model.max_context)
    _check_text(request, config.model.max_context, max_token_chars)
    check_rules(request)
    _check_speculation(request, config.speculation.draft_tokens, drafts_are_translated)


def resolve(
    request: GenerationRequest,
    prompts: Sequence[tuple[int, ...]],
    *,
    config: SlipstreamConfig,
    eos_ids: tuple[int, ...],
    vocabulary: int,
    draw: Draw,
    grammar: str = "",
    bad_words: tuple[tuple[int, ...], ...] = (),
    traceparent: str = "",
    learn_from: Source | None = None,
    draft_prompt: tuple[int, ...] = (),
) -> list[Generation]:
    """Returns the sessions of a checked request: `n` per prompt, in the order of the answer's choices."""
    generations = []
    scoring = scoring_of(request, request.n * sum(map(len, prompts)))
    for prompt in prompts:
        _check_prompt(request, prompt, vocabulary)
        prompt_len = len(prompt)
        max_len = _max_len(request, prompt_len, config.model.max_context)
        rules = rules_of(request, prompt_len, bad_words, vocabulary)
        seed = draw() if request.seed is None else request.seed & _SEED_MASK
        generations += [
            Generation(
                session=f"{draw():016x}{draw():016x}",
                prompt=prompt,
                max_len=max_len,
                stop_ids=_stop_ids(request, eos_ids),
                sampling=_sampling(request),
                seed=seed,
                draft_seed=draw(),
                choice=choice,
                hash_key=draw(),
                acceptance=_acceptance(request, config.speculation.acceptance),
                draft_tokens=_draft_tokens(request, config.speculation.draft_tokens),
                grammar=grammar,
                rules=rules,
                scoring=scoring,
                priority=request.priority,
                cache_salt=request.cache_salt or "",
                wants_rejected=request.speculation.rejected,
                traceparent=traceparent,
                model=config.model.name,
                adapter=config.adapter_of(request.model),
                learn_from=learn_from,
                draft_prompt=draft_prompt,
            )
            for choice in range(request.n)
        ]
    return generations


def learning_source(
    request: GenerationRequest, learning: LearningOptions | None, key: str, key_contributes: bool
) -> Source | None:
    """Returns the source stored with the request's examples, or None if learning from it is not allowed."""
    if learning is None or not may_learn(learning.consent, request.learn, key_contributes):
        return None
    return Source(key, request.prompt_version or "")


def _check_count(request: GenerationRequest, most: int) -> None:
    count = request.prompt_count
    if count * request.n > most:
        field = request.prompt_field if count > most else "n"
        message = f"{field}: {count} prompts with n = {request.n} exceed the limit of {most} sessions per request"
        raise RequestError(message, field, INVALID_VALUE)


def _check_limits(request: GenerationRequest, context: int) -> None:
    """Raises RequestError if the requested tokens leave no room for any prompt."""
    for field, limit in request.token_limits.items():
        if limit >= context:
            message = f"{field} is {limit}, expected less than {context}: the context holds the prompt too"
            raise RequestError(message, field, TOO_LONG)


def _check_text(request: GenerationRequest, context: int, max_token_chars: int) -> None:
    """Raises RequestError if a text is so long that no tokenization of it could fit."""
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
    available = context - prompt_len
    if available < 1:
        message = f"{request.prompt_field} has {prompt_len} tokens, expected at most {context - 1}: "
        message += f"the context of {context} must hold the answer too"
        raise RequestError(message, request.prompt_field, TOO_LONG)
    for field, limit in request.token_limits.items():
        if limit > available:
            message = f"{field} is {limit}, expected at most {available}: the context holds {context} tokens"
            raise RequestError(f"{message} and the prompt has {prompt_len}", field, TOO_LONG)
    default = available if request.default_max_tokens is None else min(available, request.default_max_tokens)
    return prompt_len + min(request.token_limits.values(), default=default)


def _stop_ids(request: GenerationRequest, eos_ids: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the stop token ids without duplicates."""
    return tuple(dict.fromkeys((*(() if request.ignore_eos else eos_ids), *request.stop_token_ids)))


def _check_speculation(request: GenerationRequest, limit: int, drafts_are_translated: bool) -> None:
    options = request.speculation
    if drafts_are_translated and options.acceptance == "rejection":
        field = "speculation.acceptance"
        message = f"{field} is rejection, but this server's draft has another tokenizer than the model; use coupled"
        raise RequestError(message, field)
    if request.seed is not None and options.acceptance == "rejection":
        field = "speculation.acceptance"
        message = f"{field} is rejection, but a seed requires coupled: the answer must not depend on the draft"
        raise RequestError(message, field)
    if options.draft_tokens is not None and options.draft_tokens > limit:
        field = "speculation.draft_tokens"
        message = f"{field} is {options.draft_tokens}, expected at most {limit}, this server's limit"
        raise RequestError(message, field, INVALID_VALUE)


def _acceptance(request: GenerationRequest, default: str) -> Acceptance:
    if request.seed is not None:
        return Acceptance.COUPLED
    return Acceptance[(request.speculation.acceptance or default).upper()]


def _draft_tokens(request: GenerationRequest, default: int) -> int:
    requested = request.speculation.draft_tokens
    return default if requested is None else requested


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
