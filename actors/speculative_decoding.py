"""Speculative decoding on one screen: draft K tokens, score them in one target forward, accept a prefix, commit.

This module is the whole algorithm over plain tensors, for one sequence and without a cache. The rest of the project
runs the same rounds as a distributed system, with drafters and targets in actors, blocks and verdicts over gRPC, paged
caches, many sequences per step, draft trees, and drafting ahead of the verdict. `tests/lossless/test_algorithm.py`
checks that the engine commits the same tokens.

Both acceptance rules are exact, and greedy decoding is a special case of each:

* Gumbel coupling (`Acceptance.COUPLED`): draft and target add the same noise to their logits and take the argmax. A
  draft token is accepted if it equals the target's own draw, so the text does not depend on the draft (Daliri et al.
  2024, arXiv 2408.07978).
* Rejection sampling (`Acceptance.REJECTION`): draft token x is accepted with probability min(1, target_probs[x] /
  draft_probs[x]). After a rejection, the next token is drawn from the normalized residual max(target_probs -
  draft_probs, 0) (Leviathan et al. 2023, arXiv 2211.17192; Chen et al. 2023, arXiv 2302.01318).

Noise is a pure function of seed, position, purpose and token id (`actors.sampling.gumbel`); no generator has state.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from actors.sampling.gumbel import Purpose, gumbel_argmax, key, uniform_scalar
from protos.messages import Acceptance

Model = Callable[[list[int]], Tensor]
"""Maps tokens to logits, (tokens, vocabulary); row i scores the token after tokens[: i + 1]."""


@dataclass(frozen=True, slots=True)
class Decoding:
    """Parameters of one sequence; under rejection sampling, the draft must not use `seed`."""

    new_tokens: int
    draft_tokens: int  # draft length K
    rule: Acceptance = Acceptance.COUPLED
    temperature: float = 1.0  # 0 means greedy decoding
    seed: int = 0
    draft_seed: int = 1
    stop_ids: Collection[int] = ()

    def draw(self, logits: Tensor, seed: int, position: int, purpose: Purpose) -> int:
        """Draws the token at `position` from softmax(logits / temperature): the argmax of logits plus Gumbel noise."""
        if self.temperature == 0:
            return int(logits.argmax())
        return gumbel_argmax(logits / self.temperature, key(seed, 0, position, purpose))


def speculative_decode(target: Model, draft: Model, prompt: Sequence[int], options: Decoding) -> Iterator[list[int]]:
    """Yields the tokens committed by each round: the accepted draft tokens and one token drawn by the target."""
    tokens = list(prompt)
    end = len(tokens) + options.new_tokens
    while len(tokens) < end:
        block, draft_logits = propose(draft, tokens, min(options.draft_tokens, end - len(tokens) - 1), options)
        target_logits = target(tokens + block)[len(tokens) - 1 :]  # (block + 1, vocabulary)
        accepted, next_token = verify(target_logits, draft_logits, block, len(tokens), options)
        committed = [*block[:accepted], next_token]
        stop = next((at for at, token in enumerate(committed) if token in options.stop_ids), None)
        committed = committed if stop is None else committed[: stop + 1]
        tokens += committed
        yield committed
        if stop is not None:
            return


def propose(draft: Model, tokens: list[int], count: int, options: Decoding) -> tuple[list[int], list[Tensor]]:
    """Drafts `count` tokens one by one; returns the tokens and the logits of each."""
    is_coupled = options.rule is Acceptance.COUPLED
    seed, purpose = (options.seed, Purpose.DRAW) if is_coupled else (options.draft_seed, Purpose.DRAFT)
    block: list[int] = []
    rows: list[Tensor] = []
    for _ in range(count):
        rows.append(draft(tokens + block)[-1])
        block.append(options.draw(rows[-1], seed, len(tokens) + len(block), purpose))
    return block, rows


def verify(
    target_logits: Tensor, draft_logits: Sequence[Tensor], block: Sequence[int], position: int, options: Decoding
) -> tuple[int, int]:
    """Returns the number of accepted tokens, and the recovered or bonus token that follows them.

    `target_logits` has shape (block + 1, vocabulary); `position` is the position of the block's first token.
    """
    for at, token in enumerate(block):
        if options.rule is Acceptance.COUPLED or options.temperature == 0:
            own = options.draw(target_logits[at], options.seed, position + at, Purpose.DRAW)
            if token != own:
                return at, own
        else:
            target_probs = torch.softmax(target_logits[at].double() / options.temperature, dim=-1)
            draft_probs = torch.softmax(draft_logits[at].double() / options.temperature, dim=-1)
            chance = uniform_scalar(key(options.seed, 0, position + at, Purpose.ACCEPT))
            if chance * draft_probs[token] >= target_probs[token]:
                residual = (target_probs - draft_probs).clamp_min(0)
                return at, gumbel_argmax(residual.log(), key(options.seed, 0, position + at, Purpose.RECOVER))
    return len(block), options.draw(target_logits[-1], options.seed, position + len(block), Purpose.DRAW)
