"""What drafting passes cost on this machine, measured once through the method's interface."""

from functools import partial
from statistics import median

from actors.engine.profile import least_seconds
from cluster.costs import DraftCost, ForwardCost
from cluster.drafting.following import DrafterLimits
from cluster.drafting.method import DraftingMethod
from cluster.drafting.requests import Want
from protos.messages import Acceptance, Open, Sampling
from protos.prefix import Prefix

ROWS = (1, 4, 16)  # sessions in a drafting pass
LONG = 4  # forwards of a drafting pass
PROMPT_TOKENS = 8


def profile_drafting(method: DraftingMethod, limits: DrafterLimits) -> DraftCost:
    """Drafting passes over sessions whose prompts are known; leaves no session behind.

    A method that finds nothing in these prompts is measured at finding nothing.
    """
    sizes = [rows for rows in ROWS if rows == 1 or rows <= limits.max_sessions]
    width = method.tokens_per_forward
    lengths = (1, width, LONG * width)
    wants = [[_want(limits, index, length) for index in range(rows)] for rows in sizes for length in lengths]
    seconds = iter(least_seconds([partial(method.propose, each, lambda: False) for each in wants]))
    method.close([want.open.session for want in wants[-1]])
    forwards = []
    further = []
    passes = []
    for rows, (one, whole, long) in zip(sizes, zip(seconds, seconds, seconds, strict=True), strict=True):
        rest_s = max(0.0, whole - one)  # all but the first of a forward's tokens
        forward_s = max(0.0, (long - whole) / (LONG - 1) - rest_s)
        forwards.append((rows, forward_s))
        further.append((rows, rest_s / max(1, width - 1)))
        passes.append(max(0.0, one - forward_s))
    return DraftCost(
        forward=ForwardCost(by_tokens=tuple(forwards)),
        further=ForwardCost(by_tokens=tuple(further)),
        per_pass_s=median(passes),
        tokens_per_forward=width,
    )


def _want(limits: DrafterLimits, index: int, length: int) -> Want:
    """Greedy, and of the length asked for however unlikely its tokens; no two prompts share a page."""
    tokens = tuple((index * PROMPT_TOKENS + position) % limits.vocabulary for position in range(PROMPT_TOKENS))
    request = Open(
        session=f"profile {index}",
        attempt=1,
        tokens=tokens,
        prompt_len=len(tokens),
        max_len=limits.max_context,
        stop_ids=(),
        sampling=Sampling(temperature=0.0),
        seed=0,
        choice=0,
        hash_key=0,
        acceptance=Acceptance.COUPLED,
        max_draft_tokens=length,
    )
    return Want(request, tokens, Prefix(0, tokens).hash, length)
