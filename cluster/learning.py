"""Learning from traffic: selects sessions as training examples, and decides whether to promote a trained draft.

Routers submit finished sessions as `Example`s. A trainer fits the draft to them. It compares the candidate with the
current version on held-out sessions, and promotes the candidate if it is better. This module is pure; the example
store, the trainer and the version folders are in `actors.learning`.

* `may_learn` checks consent. Without `draft.learning`, nothing is stored.
* `sketch` maps an answer to a few hashes. Answers with a common hash are near-duplicates and count once per target.
* `is_held_out` reserves a fixed share of the examples for evaluation. It depends only on content, so an example never
  moves between the sets.
* `compare` and `decide` evaluate a candidate. The statistical unit is a session, because tokens within a session are
  correlated.

With Gumbel coupling or greedy decoding, drafts never change the output, so the version may change in the middle of an
answer.
"""

import math
from collections.abc import Sequence
from enum import StrEnum
from hashlib import blake2b
from statistics import NormalDist, fmean, stdev

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from protos.frozen import value

SHINGLE = 4  # tokens per shingle
BANDS = 6
HASHES_PER_BAND = 12  # two answers share a band with probability 0.99 at 95 % equal shingles, and 0.08 at 70 %
HELD_OUT = 5  # one in HELD_OUT examples is reserved for evaluation


class Consent(StrEnum):
    """Consent rule for training examples."""

    ALL = "all"  # all requests, unless the request or its API key opts out
    OPTED_IN = "opted_in"  # only requests that opt in


@value
class Source:
    """Origin of an example; empty values are unknown."""

    key: str = ""  # name of the API key
    prompt_version: str = ""


@value
class Example:
    """One finished session: the target's own answer to a prompt, in token ids."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    source: Source = Source()
    session: str = ""  # name under which a drafter may have kept the target's states; empty: none


def may_learn(consent: Consent, choice: str | None, key_contributes: bool) -> bool:
    """Returns True if a request may become an example; `choice` is its `metadata.learn`, "true" or "false"."""
    if not key_contributes or choice == "false":
        return False
    return consent is Consent.ALL or choice == "true"


def _hash(data: bytes) -> int:
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little", signed=True)


def _digest(*numbers: int) -> int:
    return _hash(b"".join(number.to_bytes(8, "little", signed=True) for number in numbers))


# A single hash per shingle, multiplied by different odd constants, replaces independent hash functions.
FACTORS = np.array([_digest(index) for index in range(BANDS * HASHES_PER_BAND)]).view(np.uint64) | np.uint64(1)


def sketch(answer: Sequence[int], target: str = "") -> tuple[int, ...]:
    """Returns one hash per band of an answer's MinHash signature (Broder, 1997), as signed 64-bit integers.

    `target` is a fingerprint; answers of different targets share no hash.
    """
    tokens = np.array(answer or (-1,), np.int64).view(np.uint64)
    width = min(SHINGLE, len(tokens))
    count = len(tokens) - width + 1
    weighted = [tokens[first : first + count] * FACTORS[first] for first in range(width)]
    shingles = _mixed(np.add.reduce(weighted))
    least = (FACTORS[:, np.newaxis] * shingles).min(axis=1)
    bands = enumerate(np.split(least, BANDS))
    return tuple(_hash(bytes([index]) + band.tobytes() + target.encode()) for index, band in bands)


def _mixed(numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Hashes 64-bit integers with the finalizer of SplitMix64 (Steele et al., 2014)."""
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return numbers ^ (numbers >> np.uint64(31))


def is_held_out(example: Example) -> bool:
    """Returns True if the example is reserved for evaluation."""
    return _digest(*example.prompt, *example.answer) % HELD_OUT == 0


def held_out_sessions(min_sessions: int) -> int:
    """Returns how many held-out examples a training needs: half of them stop it, the other half judge the result."""
    return 2 * min_sessions


def missing_examples(new: int, held_out: float, min_examples: int, min_sessions: int) -> int:
    """Returns about how many more examples a training needs, given new ones and held-out ones, old or new."""
    return max(0, min_examples - new, math.ceil(HELD_OUT * (held_out_sessions(min_sessions) - held_out)))


@value
class SessionScore:
    """Teacher-forced result of a draft on one example."""

    tokens: int  # number of tokens in the answer
    agreed: int  # number of tokens equal to the draft's first choice
    verifies: int  # number of target steps needed for the answer with this draft


def score(agreements: Sequence[bool], draft_tokens: int, further: Sequence[Sequence[bool]] = ()) -> SessionScore:
    """Scores a draft on one answer from its teacher-forced predictions.

    `agreements[i]` is True if the draft's first choice at position i equals token i of the answer. A draft may predict
    several tokens per forward pass. `further[k - 1][i]` is True if the k-th further token after position i equals token
    i + k, given correct tokens before it.

    The step count is exact for greedy chains of `draft_tokens` without lookahead, where accepted draft tokens equal the
    target's tokens.
    """
    per_forward = 1 + len(further)
    verifies = position = 0
    while position < len(agreements):
        accepted = 0
        while accepted < draft_tokens and position + accepted < len(agreements):
            begin, offset = position + accepted - accepted % per_forward, accepted % per_forward
            if not (further[offset - 1][begin] if offset else agreements[begin]):
                break
            accepted += 1
        position += accepted + 1  # the last token is the target's own
        verifies += 1
    return SessionScore(len(agreements), sum(agreements), verifies)


class Figures(BaseModel):
    """Totals of one evaluation of a draft."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    sessions: int  # sessions with scored tokens
    agreement: float  # share of tokens equal to the draft's first choice
    tokens_per_verify: float

    @classmethod
    def of(cls, scores: Sequence[SessionScore]) -> "Figures":
        tokens = sum(each.tokens for each in scores)
        agreed = sum(each.agreed for each in scores)
        verifies = sum(each.verifies for each in scores)
        return cls(
            sessions=sum(each.tokens > 0 for each in scores),
            agreement=agreed / tokens if tokens else 0.0,
            tokens_per_verify=tokens / verifies if verifies else 0.0,
        )


class Comparison(BaseModel):
    """Results of the current version (`before`) and a candidate (`after`) on the same examples."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="constants")

    before: Figures
    after: Figures
    low: float  # 95 % confidence bounds of the ratio of tokens per verify after training to before
    high: float


def compare(before: Sequence[SessionScore], after: Sequence[SessionScore], confidence: float = 0.95) -> Comparison:
    """Compares the scores of two drafts; both lists contain the same sessions in the same order.

    The confidence interval of the ratio uses the delta method for paired sessions. Both drafts are scored on the same
    answers, so the ratio of tokens per verify is the inverse ratio of verify counts. Its error follows from the mean of
    `before - ratio * after`.
    """
    assert [each.tokens for each in before] == [each.tokens for each in after], "both drafts score the same sessions"
    figures = Figures.of(before), Figures.of(after)
    if figures[0].sessions < 2:
        return Comparison(before=figures[0], after=figures[1], low=0.0, high=math.inf)
    ratio = sum(each.verifies for each in before) / sum(each.verifies for each in after)
    errors = [one.verifies - ratio * other.verifies for one, other in zip(before, after, strict=True)]
    mean = fmean(each.verifies for each in after)
    half = NormalDist().inv_cdf((1 + confidence) / 2) * stdev(errors) / math.sqrt(len(errors)) / mean
    return Comparison(before=figures[0], after=figures[1], low=ratio - half, high=ratio + half)


class State(StrEnum):
    """Promotion state of a version."""

    CANDIDATE = "candidate"  # not promoted yet
    CURRENT = "current"
    REJECTED = "rejected"  # not better on recent examples, or too much worse on general ones
    REPLACED = "replaced"  # a later version was promoted
    ROLLED_BACK = "rolled_back"


@value
class Decision:
    """Promotion decision for a candidate, with the reason."""

    is_better: bool
    reason: str


def decide(recent: Comparison, general: Comparison | None, max_general_loss: float, min_sessions: int) -> Decision:
    """Decides on promotion from held-out recent sessions and, if available, general examples.

    `max_general_loss` is the maximum absolute drop in agreement on general examples. Non-finite figures never lead to
    promotion.
    """
    if recent.after.sessions < min_sessions:
        return Decision(False, f"{recent.after.sessions} held-out sessions, {min_sessions} needed")
    if not recent.low > 1:
        return Decision(
            False,
            f"tokens per verify {recent.before.tokens_per_verify:.2f} -> {recent.after.tokens_per_verify:.2f},"
            f" interval of the ratio {recent.low:.3f} to {recent.high:.3f} reaches 1",
        )
    if general is not None and not (loss := general.before.agreement - general.after.agreement) <= max_general_loss:
        return Decision(False, f"agreement on general examples falls by {loss:.3f}, more than {max_general_loss:g}")
    return Decision(
        True, f"tokens per verify {recent.before.tokens_per_verify:.2f} -> {recent.after.tokens_per_verify:.2f}"
    )


class Manifest(BaseModel):
    """Metadata of one version, stored with its weights. Version 0 is the configured draft."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="constants")

    version: int = Field(gt=0)
    parent: int = Field(ge=0)
    created: float  # Unix time, in seconds
    state: State
    reason: str
    method: str  # drafting method of the weights
    target: str  # fingerprint of the target that generated the examples
    draft: str = ""  # fingerprint of the configured draft from which it descends; empty: any, as in older manifests
    examples: int
    tokens: int  # number of answer tokens in the examples
    newest: int = 0  # id of the newest training example
    seconds: float  # training time
    recent: Comparison | None = None
    general: Comparison | None = None

    def fits(self, target: str, draft: str) -> bool:
        """Returns True if the version learned from this target and descends from this configured draft."""
        return self.target == target and self.draft in ("", draft)
