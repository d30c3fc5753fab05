"""Turns a draft model's logits into draft tokens: likely tokens of the target, or draws for rejection sampling.

`Calibration` learns, from the target's decisions, the probability that each candidate is the target's token. Under
Gumbel coupling, the target's token maximizes log probability plus noise, and the drafter knows the noise. The draft's
log probabilities are only estimates. With the full noise, badly estimated tokens with large noise would win too often,
so the noise gets a smaller weight. This weight and the confidence in the draft come from a conditional logit (McFadden
1974) over the candidates plus one alternative for all other tokens:

    weight of a candidate  ~  exp(sharpness x its log probability + noise_share x its noise)
    weight of the others   ~  exp(others + others_slope x log of their probability)

AdaGrad (Duchi et al. 2011) learns the four weights online, per kind of draft and range of temperature. Greedy requests
have no noise; for them, the same model calibrates the draft's own probabilities.
"""

import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from actors.compute.kv_cache import to_device
from actors.sampling.gumbel import Purpose, gumbel_argmax, gumbels, key
from actors.sampling.logits_processors import PROCESSOR_FACTORIES, ProcessorChain, ProcessorFactory, chain_of
from actors.sampling.truncation import filtered, scaled
from cluster.drafting.draft_state import BlockDraft
from cluster.drafting.lookahead import PendingPositions, TextPosition
from cluster.drafting.requests import SessionText
from cluster.drafting.trees import Choices
from cluster.errors import ModelError
from protos.frozen import value
from protos.messages import Sampling

Floats = NDArray[np.float64]

LEARNING_RATE = 0.1  # 0.05 and 0.2 predict drafts equally well
SHARPNESS_BOUNDS = (0.1, 8.0)  # without bounds, this weight diverges for a draft that is always right
NOISE_SHARE_BOUNDS = (0.3, 1.0)  # bounds of the noise weight, relative to sharpness
MIN_OTHERS_PROBABILITY = 1e-4  # lower bound of the other tokens' total probability, since its logarithm is a feature

# Fitted with the bundled draft on the prompts of `slipstream bench`. For sampled requests with a temperature below 1,
# the first two weights are multiplied by the temperature: errors in logits matter more at low temperatures.
GREEDY_WEIGHTS = (1.05, 0.0, -1.0, 0.75)
SAMPLED_WEIGHTS = (0.95, 0.8, 2.0, 0.75)


def check_finite(logits: Tensor, folder: Path) -> None:
    """Raises ModelError if the draft in a folder computed a row without a finite maximum, (rows, columns)."""
    if not bool(torch.isfinite(logits.amax(dim=-1)).all()):
        raise ModelError(f"{folder} computes NaN or infinite logits; train it again")


@value
class DraftKind:
    """Kind of draft, with its own fit."""

    octave: int | None  # half-octave of the temperature; None: greedy
    is_consecutive_prediction: bool  # predicted after a draft token, without a forward in between

    @classmethod
    def of(cls, sampling: Sampling, is_consecutive_prediction: bool) -> "DraftKind":
        if sampling.greedy:
            return cls(None, is_consecutive_prediction)
        return cls(round(2 * math.log2(sampling.temperature)), is_consecutive_prediction)

    @property
    def prior(self) -> Floats:
        """Initial weights, (4,)."""
        if self.octave is None:
            return np.array(GREEDY_WEIGHTS)
        scale = min(1.0, 2.0 ** (self.octave / 2))
        sharpness, noise_share, *others = SAMPLED_WEIGHTS
        return np.array((scale * sharpness, scale * noise_share, *others))


@dataclass(eq=False, slots=True)
class _Fit:
    weights: Floats
    squares: Floats = field(default_factory=lambda: np.ones(4))  # sum of squared gradients

    def learn(self, candidates: "Candidates", index: int | None) -> None:
        """Takes one gradient step. `index` is the candidate equal to the target's token; None: another token."""
        features = candidates.features
        chances = candidates.chances(self.weights)
        row = features[len(features) - 1 if index is None else index]
        gradient = row - chances @ features
        self.squares += gradient**2
        weights = self.weights + LEARNING_RATE * gradient / np.sqrt(self.squares)
        sharpness = min(max(weights[0], SHARPNESS_BOUNDS[0]), SHARPNESS_BOUNDS[1])
        weights[0] = sharpness
        if self.weights[1]:  # greedy requests have no noise
            weights[1] = min(max(weights[1], NOISE_SHARE_BOUNDS[0] * sharpness), NOISE_SHARE_BOUNDS[1] * sharpness)
        self.weights = weights


@dataclass(frozen=True, eq=False, slots=True)
class Candidates:
    """Likely tokens at one position, with the draft's log probabilities and the noise, (count,) each."""

    ids: NDArray[np.int64]
    log_probs: Floats
    noise: Floats
    log_others: float  # log of the other tokens' total probability

    @property
    def features(self) -> Floats:
        """Features of the candidates, (count + 1, 4); the last row represents all other tokens."""
        count = len(self.ids)
        features = np.zeros((count + 1, 4))
        features[:count, 0] = self.log_probs
        features[:count, 1] = self.noise
        features[count, 2] = 1.0
        features[count, 3] = self.log_others
        return features

    def chances(self, weights: Floats) -> Floats:
        """Returns the probability that each is the target's token, (count + 1,); the last entry is for all other
        tokens.
        """
        scores = self.features @ weights
        powers = np.exp(scores - scores.max())
        chances: Floats = powers / powers.sum()
        return chances


class Calibration:
    """All fits of a drafter, and the candidates at positions not yet decided by the target."""

    def __init__(self) -> None:
        self._fits: dict[DraftKind, _Fit] = {}
        self._open: PendingPositions[tuple[DraftKind, Candidates]] = PendingPositions()

    def chances(self, kind: DraftKind, candidates: Candidates) -> Floats:
        """Returns the probability that each is the target's token, (count + 1,); the last entry is for all other
        tokens.
        """
        return candidates.chances(self.weights(kind))

    def weights(self, kind: DraftKind) -> Floats:
        """Returns the current weights of a kind, (4,)."""
        return self._fit(kind).weights

    def note(self, session: str, position: TextPosition, kind: DraftKind, candidates: Candidates) -> None:
        """Records the candidates at a position."""
        self._open.note(session, position, (kind, candidates))

    def committed(self, session: str, tokens: Sequence[int]) -> None:
        """Learns from positions within the session's committed text."""
        for (kind, candidates), token in self._open.resolve(session, tokens):
            self._learn(kind, candidates, token)

    def close(self, session: str) -> None:
        self._open.close(session)

    def restart(self) -> None:
        """Prepares for new draft weights: fits keep their weights but learn as fast as new fits."""
        self._fits = {kind: _Fit(fit.weights) for kind, fit in self._fits.items()}
        self._open = PendingPositions()

    def _learn(self, kind: DraftKind, candidates: Candidates, token: int) -> None:
        """Updates a fit with the target's token at the candidates' position."""
        indices = np.flatnonzero(candidates.ids == token)
        self._fit(kind).learn(candidates, int(indices[0]) if len(indices) else None)

    def _fit(self, kind: DraftKind) -> _Fit:
        if kind not in self._fits:
            self._fits[kind] = _Fit(kind.prior)
        return self._fits[kind]


@dataclass(frozen=True, slots=True)
class DraftingLimits:
    """Limits and thresholds of a draft model.

    Under rejection sampling, the drafter sends `top_k` entries of draft_probs per token, as integer weights (uint16 on
    the wire); the likeliest token has weight `weight_scale`. Otherwise, a block on which the target waits ends once its
    cumulative acceptance probability falls below `min_confidence`, because further tokens would delay the target longer
    than they save. A forward feeds at most `pass_tokens`. A long prompt thus takes several rounds, which limits memory
    and the delay of other blocks. Sessions with more than `max_positions` positions get no blocks.
    """

    top_k: int
    min_confidence: float = 0.0
    pass_tokens: int = 2048
    max_positions: int | None = None
    weight_scale: int = 60_000


log = logging.getLogger(__name__)

# Candidates per position. With 2048, the first choice is no better; at temperature 1, the third is right in 2 % more
# cases.
MAX_CANDIDATES = 64
MAX_BRANCH_TOKENS = 2  # maximum tokens of a side branch; later tokens are rarely among a block's likeliest
MAX_CHOICES = 16  # maximum candidates per position kept as choices
# Number of inputs of `DraftSampler.choose`: keys, and the bits of temperatures, sharpness and noise shares.
CHOICE_INPUTS = 4
MIN_LOG_PROB = -30.0
MIN_LOGIT = torch.finfo(torch.float32).min


Read = tuple[BlockDraft, Tensor, Tensor | None]
"""A block and the model's output at its next positions: logits, (positions, columns), and states, (positions, hidden).
"""


class _Prediction(NamedTuple):
    draft: BlockDraft
    logits: Tensor  # (columns,)
    state: Tensor | None  # (hidden,)
    position: int
    is_consecutive_prediction: bool


class NoiseSource:
    """Addresses of the target's noise: by default, draft tokens are tokens of the target."""

    def ids(self, draft: BlockDraft, tokens: Tensor) -> Tensor:
        """Returns the target tokens whose noise these draft tokens share, (tokens,); -1 for none."""
        return tokens

    def position(self, draft: BlockDraft, position: int) -> int:
        """Returns the target's position of the token at `position` of the draft's text."""
        return position


OWN_NOISE = NoiseSource()


class DraftSampler:
    """Extends blocks by tokens. Column i of the logits scores `token_ids[i]`, below `vocabulary`.

    A block ends before a position with NaN or infinite logits. This is exact under rejection sampling too, because the
    end depends only on the tokens before it.
    """

    def __init__(
        self,
        token_ids: Tensor,
        vocabulary: int,
        limits: DraftingLimits,
        calibration: Calibration,
        processor_factories: tuple[ProcessorFactory, ...] = PROCESSOR_FACTORIES,
        noise: NoiseSource = OWN_NOISE,
    ) -> None:
        self._processors = SessionProcessors(processor_factories)
        self._noise = noise
        self._token_ids = token_ids  # (columns,)
        self._vocabulary = vocabulary
        self._limits = limits
        self._calibration = calibration
        self._has_warned = False

    def extend(self, read: Sequence[Read]) -> None:
        """Adds one token per row of logits to each block, or ends the block."""
        together: list[_Prediction] = []
        for draft, logits, hidden in read:
            predictions = [
                _Prediction(draft, row, state, draft.position + offset, draft.is_consecutive_prediction(offset))
                for offset, (row, state) in enumerate(zip(logits, _states_or_nones(hidden, len(logits)), strict=True))
            ]
            if draft.sends_probs:
                self._draw(predictions)
            elif (chain := self._processors.of(draft.text)) is not None:
                for prediction in predictions:  # a position depends on the previous position
                    self._offer_processed(prediction, chain)
            else:
                together += predictions
        if together:
            self._offer(together)

    def committed(self, session: str, tokens: Sequence[int]) -> None:
        """Updates the calibration with committed text."""
        self._calibration.committed(session, tokens)

    def close(self, session: str) -> None:
        self._calibration.close(session)
        self._processors.close(session)

    def exchange(self, token_ids: Tensor) -> None:
        """Switches to new weights; column i of their logits scores `token_ids[i]`."""
        self._token_ids = token_ids
        self._calibration.restart()
        self._has_warned = False

    # ------------------------------------------------------------ prediction of the target's draw

    def _offer(self, predictions: Sequence[_Prediction]) -> None:
        """Adds the target's likeliest tokens, given the noise of the target's own draw."""
        for prediction, found in zip(predictions, self._considered(predictions), strict=True):
            self._add(prediction.draft, prediction.is_consecutive_prediction, found, prediction.state)

    def _add(
        self,
        draft: BlockDraft,
        is_consecutive_prediction: bool,
        found: Floats,
        state: Tensor | None = None,
        fed: int | None = None,
    ) -> None:
        """Adds the likeliest of a position's candidates, as `_packed` returns them, or the one at index `fed`."""
        if draft.is_complete:
            return
        if not found[0]:
            self._end(draft)
            return
        log_probs, ids, noise = np.split(found[1:], 3)
        sampling = draft.text.open.sampling
        candidates = _candidates(sampling, log_probs, ids.astype(np.int64), noise)
        kind = DraftKind.of(sampling, is_consecutive_prediction)
        self._calibration.note(draft.request.session, draft.next_position, kind, candidates)
        choices = _likeliest(candidates, self._calibration.chances(kind, candidates), fed)
        draft.append(choices.tokens[0], choices, state)

    def _considered(self, predictions: Sequence[_Prediction]) -> Floats:
        """Returns the candidates at each position, as `_packed` does. The host waits for the device once."""
        logits = torch.stack([prediction.logits for prediction in predictions]).float()
        requests = [prediction.draft.text.open for prediction in predictions]
        temperatures = [request.sampling.temperature or 1.0 for request in requests]
        (scale,) = to_device([temperatures], logits.device, torch.float32)
        finite, log_probs, columns = _ranked(logits, scale)
        ids = self._token_ids[columns]
        noise = torch.zeros(ids.shape, dtype=torch.float64, device=ids.device)
        sampled = [row for row, request in enumerate(requests) if not request.sampling.greedy]
        if sampled:
            draw_keys = [self._draw_key(predictions[row].draft, predictions[row].position) for row in sampled]
            at, keys = to_device([sampled, draw_keys], ids.device)
            drawn = torch.stack([self._noise.ids(predictions[row].draft, ids[row]) for row in sampled])
            noise.index_copy_(0, at, gumbels(keys.unsqueeze(1), drawn).masked_fill(drawn < 0, 0.0))
        return _packed(finite, log_probs, ids, noise).cpu().numpy()

    # ------------------------------------------------------------ chains of predictions, chosen on the device

    @property
    def knows_noise(self) -> bool:
        """True if the noise of a block's tokens depends only on their positions; False in translated text."""
        return self._noise is OWN_NOISE

    def can_chain(self, drafts: Sequence[BlockDraft]) -> bool:
        """Returns True if `choose` can choose all tokens of these blocks.

        Logits processors depend on earlier choices on the host. Filters restrict the candidates, and rejection
        sampling draws from them.
        """
        return all(
            not draft.sends_probs
            and (draft.text.open.sampling.greedy or not draft.text.open.sampling.is_filtered)
            and self._processors.of(draft.text) is None
            for draft in drafts
        )

    def choice_inputs(self, drafts: Sequence[BlockDraft], tokens: int) -> list[list[list[int]]]:
        """Returns the inputs of `choose` for the next `tokens` tokens: CHOICE_INPUTS lists each, by draft."""
        samplings = [draft.text.open.sampling for draft in drafts]
        weights = [self._calibration.weights(DraftKind.of(sampling, False)) for sampling in samplings]
        floats = [
            [sampling.temperature for sampling in samplings],
            [each[0] for each in weights],
            [each[1] for each in weights],
        ]
        bits = np.array(floats, np.float64).view(np.int64).tolist()
        return [
            [[self._draw_key(draft, draft.position + offset) for draft in drafts], *bits] for offset in range(tokens)
        ]

    def choose(self, logits: Tensor, inputs: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Chooses the likeliest candidate per row, for `StaticChain`, by the scores of `Candidates.chances`.

        The values are those of `_packed`, then the index of the chosen candidate.
        """
        keys, *bits = inputs
        temperatures, sharpness, noise_share = [part.view(torch.float64).unsqueeze(1) for part in bits]
        is_sampled = temperatures > 0
        finite, log_probs, columns = _ranked(logits, torch.where(is_sampled, temperatures, 1.0).float().squeeze(1))
        ids = self._token_ids[columns]
        noise = torch.where(is_sampled, gumbels(keys.unsqueeze(1), ids), 0.0)
        scores = sharpness * log_probs.double().clamp_min(MIN_LOG_PROB) + noise_share * noise
        best = scores.argmax(dim=-1, keepdim=True)
        return ids.gather(1, best).squeeze(1), torch.cat([_packed(finite, log_probs, ids, noise), best], dim=1)

    def extend_by_chains(self, drafts: Sequence[BlockDraft], counts: Sequence[int], values: Tensor) -> None:
        """Adds the first `counts` tokens of chains to the blocks; `values` as `StaticChain.run` returns them."""
        for row, (draft, count) in enumerate(zip(drafts, counts, strict=True)):
            for found in values[:count, row].numpy():
                self._add(draft, False, found[:-1], fed=int(found[-1]))

    def _offer_processed(self, prediction: _Prediction, chain: ProcessorChain) -> None:
        """Applies the logits processors at this position, after the text and the block's earlier tokens, and adds the
        likeliest tokens.

        If a grammar allows exactly one token, this token is certain, even without a column in the draft's head.
        """
        draft = prediction.draft
        whole = self._whole(prediction.logits).unsqueeze(0)
        if not draft.is_complete and not bool(torch.isfinite(whole.max())):
            self._end(draft)
            return
        processed = chain.apply(whole, [chain.path(draft.whole_text)])[0]
        left = torch.isfinite(processed).nonzero().flatten()
        if len(left) == 1:
            draft.append(int(left[0]), Choices((int(left[0]),), (1.0,)), prediction.state)
        else:
            offered = processed[self._token_ids[: len(prediction.logits)]]
            self._offer([prediction._replace(logits=offered.masked_fill(offered.isneginf(), MIN_LOGIT))])

    def _end(self, draft: BlockDraft) -> None:
        """Ends a block before a position with NaN or infinite logits."""
        draft.is_cut = True
        if not self._has_warned:
            self._has_warned = True
            log.warning("the draft computed NaN or infinite logits, so blocks end before them; fetch its weights again")

    def _draw_key(self, draft: BlockDraft, position: int) -> int:
        """Returns the key of the target's noise at this position."""
        request = draft.text.open
        return key(request.seed, request.choice, self._noise.position(draft, position), Purpose.DRAW)

    # ------------------------------------------------------------ own draws, for rejection sampling

    def _draw(self, predictions: Sequence[_Prediction]) -> None:
        for draft, logits, state, *_ in predictions:
            if draft.is_complete:
                continue
            whole = self._whole(logits).unsqueeze(0)
            if not bool(torch.isfinite(whole.max())):
                self._end(draft)
                continue
            if (chain := self._processors.of(draft.text)) is not None:
                whole = chain.apply(whole, [chain.path(draft.whole_text)])
            row = self._drawable(filtered(whole, draft.text.open.sampling)[0])
            token, ids, weights = self._draw_for_rejection(draft, row)
            draft.append(token, _choices(row), state, ids, weights)

    def _draw_for_rejection(self, draft: BlockDraft, logits: Tensor) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
        """Draws a token from the truncated and rounded distribution to send; returns the token, and the ids and weights
        of the distribution.

        The noise is a function of seed and prefix, so a prefix always gets the same continuation, at any draft length
        and after any number of repeats.
        """
        top_k = self._limits.top_k
        values, ids = logits.topk(min(top_k, int(torch.isfinite(logits).sum())))
        weights = (torch.exp(values - values[0]) * self._limits.weight_scale).round()
        session = draft.text.open
        at = key(session.seed, session.choice, draft.prefix_hash, Purpose.DRAFT)
        token = int(ids[gumbel_argmax(weights.double().log(), at)])
        padding = top_k - len(ids)
        return token, (*ids.tolist(), *[0] * padding), (*map(int, weights.tolist()), *[0] * padding)

    def _drawable(self, logits: Tensor) -> Tensor:
        """Replaces non-finite logits, (vocabulary,), by -inf; leaves one token, which the target rejects, if the head
        has no column for an allowed token.
        """
        logits = logits.masked_fill(~torch.isfinite(logits), -torch.inf)
        if bool(logits.isneginf().all()):
            logits[self._token_ids[0]] = 0.0
        return logits

    def _whole(self, logits: Tensor) -> Tensor:
        """Scatters logits to the whole vocabulary, in float32; a draft head may have fewer columns."""
        whole = torch.full((self._vocabulary,), -torch.inf, dtype=torch.float32, device=logits.device)
        whole[self._token_ids[: len(logits)]] = logits.float()
        return whole


class SessionProcessors:
    """Logits processors of a drafter's sessions, created for a session's first draft."""

    def __init__(self, processor_factories: tuple[ProcessorFactory, ...]) -> None:
        self._factories = processor_factories
        self._all: dict[str, tuple[SessionText, ProcessorChain | None]] = {}

    def of(self, text: SessionText) -> ProcessorChain | None:
        """Returns the session's processors after its committed text; None if the request needs none."""
        name = text.open.session
        current, chain = self._all.get(name, (None, None))
        if current is not text:  # a new or reopened session
            chain = chain_of(text.open, self._factories)
            self._all[name] = text, chain
        if chain is not None:
            chain.follow(text.tokens)
        return chain

    def close(self, session: str) -> None:
        self._all.pop(session, None)


def _candidates(
    sampling: Sampling, log_probs: NDArray[np.float64], ids: NDArray[np.int64], noise: NDArray[np.float64]
) -> Candidates:
    """Restricts candidates to those likely to pass top-k, top-p and min-p."""
    probs = np.exp(log_probs)
    count = _count_kept(log_probs, probs, sampling)
    others = 1.0 - float(probs.sum()) if count == len(ids) else 0.0
    within = math.log(probs[:count].sum()) if count < len(ids) else 0.0
    log_probs = np.maximum(log_probs[:count] - within, MIN_LOG_PROB)
    return Candidates(ids[:count], log_probs, noise[:count], math.log(max(others, MIN_OTHERS_PROBABILITY)))


def _count_kept(log_probs: NDArray[np.float64], probs: NDArray[np.float64], sampling: Sampling) -> int:
    """Returns the number of tokens that pass the request's filters; at least one."""
    count = len(probs)
    if sampling.greedy:
        return count
    if sampling.top_k:
        count = min(count, sampling.top_k)
    if sampling.top_p < 1:
        total = probs[:count].sum() if sampling.top_k else 1.0
        before = probs[:count].cumsum() - probs[:count]
        count = int((before < sampling.top_p * total).sum())
    if sampling.min_p > 0:
        count = int((log_probs[:count] >= log_probs[0] + math.log(sampling.min_p)).sum())
    return max(1, count)


def _ranked(logits: Tensor, temperatures: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Ranks the candidates by logits, (rows, columns), float32, and temperatures, (rows,).

    Returns a mask of rows with a finite maximum, (rows,), and log probabilities and columns, highest first, (rows,
    considered) each.
    """
    finite = torch.isfinite(logits.amax(dim=-1))  # single -inf logits are valid: models mask tokens with them
    logits = logits.masked_fill(~torch.isfinite(logits), MIN_LOGIT)
    largest = logits.max(dim=-1, keepdim=True).values
    scores = torch.log_softmax(scaled(logits, largest, temperatures.unsqueeze(1)), dim=-1)
    return finite, *scores.topk(min(MAX_CANDIDATES, logits.shape[-1]), dim=-1)


def _packed(finite: Tensor, log_probs: Tensor, ids: Tensor, noise: Tensor) -> Tensor:
    """Joins what the host reads of each row in one copy; doubles represent token ids exactly."""
    return torch.cat([finite.unsqueeze(1).double(), log_probs.double(), ids.double(), noise], dim=1)


def _likeliest(candidates: Candidates, chances: NDArray[np.float64], fed: int | None) -> Choices:
    """Returns the candidates sorted by probability, highest first; the one at index `fed` precedes its equals."""
    order = np.argsort(-chances[:-1], kind="stable")
    if fed is not None and order[0] != fed:  # device and host may round the scores of a tie differently
        order = np.concatenate([[fed], order[order != fed]])
    order = order[:MAX_CHOICES]
    return Choices(candidates.ids[order].tolist(), chances[order].tolist())


def _choices(logits: Tensor) -> Choices:
    """Returns the draft model's likeliest tokens, highest probability first."""
    chances, ids = torch.softmax(logits, dim=-1).topk(min(MAX_CHOICES, logits.shape[-1]))
    return Choices(ids.tolist(), chances.tolist())


def _states_or_nones(states: Tensor | None, tokens: int) -> Iterable[Tensor | None]:
    """Returns the state of each token, (hidden,); all None without states."""
    return repeat(None, tokens) if states is None else states
