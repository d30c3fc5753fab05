"""How much one request may hold: each bound is looked at before what it bounds is."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RequestBounds:
    """Most items of each list of a request."""

    prompts: int = 128
    prompt_tokens: int = 1 << 20  # of one prompt that is given as tokens
    messages: int = 4096
    parts: int = 256  # of one message
    tools: int = 128
    variables: int = 64  # for a chat template
    stops: int = 4096
    words: int = 1024  # in `bad_words`
    token_ids: int = 4096  # in `logit_bias`, and in `stop_token_ids`
    allowed: int = 1 << 18  # token ids
    choices: int = 4096  # that an answer may be one of
    labels: int = 16  # in `metadata`
    containers: int = 1 << 15  # lists and objects of a whole body
    members: int = 1 << 16  # fields of all its objects
    strings: int = 160_000  # names and texts of as many fields, and of lists, where brackets and colons may be text
