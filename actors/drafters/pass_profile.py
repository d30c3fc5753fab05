"""Measures the cost of a method's drafting passes on this machine."""

from functools import partial
from statistics import median

from actors.engine.runner import fastest_s
from cluster.costs import DraftCost, ForwardCost
from cluster.drafting.method import DraftingMethod, ReadsStates
from cluster.drafting.session_table import DrafterLimits
from protos.messages import DraftRequest, Open
from protos.prefix import Prefix

PROFILE_ROWS = (1, 4, 16)  # sessions per measured pass
PROFILE_FORWARDS = 4  # forwards in the longest measured pass
PROMPT_TOKENS = 8


def profile_drafting(method: DraftingMethod, limits: DrafterLimits) -> DraftCost:
    """Measures drafting passes over sessions with generated prompts, then closes the sessions.

    If a method finds no candidates in these prompts, its passes are measured without drafting.
    """
    sizes = [rows for rows in PROFILE_ROWS if rows == 1 or rows <= limits.max_sessions]
    width = method.tokens_per_forward
    lengths = (1, width, PROFILE_FORWARDS * width)
    sessions = [_session(limits, index) for index in range(sizes[-1])]
    for session in sessions:
        method.open(session)
        if isinstance(method, ReadsStates):  # all-zero states
            method.states(session.session, 0, bytes((PROMPT_TOKENS - 1) * method.states_format.row_bytes))
    batches = [[_request(each, length) for each in sessions[:rows]] for rows in sizes for length in lengths]
    seconds = iter(fastest_s([partial(method.draft, requests) for requests in batches]))
    method.close([session.session for session in sessions])
    forwards = []
    further = []
    passes = []
    for rows, (one, whole, long) in zip(sizes, zip(seconds, seconds, seconds, strict=True), strict=True):
        rest_s = max(0.0, whole - one)  # duration of all but the first token of a forward
        forward_s = max(0.0, (long - whole) / (PROFILE_FORWARDS - 1) - rest_s)
        forwards.append((rows, forward_s))
        further.append((rows, rest_s / max(1, width - 1)))
        passes.append(max(0.0, one - forward_s))
    return DraftCost(
        forward=ForwardCost(by_tokens=tuple(forwards)),
        further=ForwardCost(by_tokens=tuple(further)),
        per_pass_s=median(passes),
        tokens_per_forward=width,
    )


def _session(limits: DrafterLimits, index: int) -> Open:
    """Returns a greedy session whose prompt shares no page with other prompts."""
    first = limits.vocabulary // 2 + index * PROMPT_TOKENS  # vocabularies begin with control tokens
    tokens = tuple((first + position) % limits.vocabulary for position in range(PROMPT_TOKENS))
    return Open.measured(f"profile {index}", tokens, limits.max_context, limits.max_context)


def _request(session: Open, length: int) -> DraftRequest:
    """Returns a request for a block of `length` tokens, without a probability threshold."""
    prefix_hash = Prefix(session.hash_key, session.tokens).hash
    return DraftRequest(session.session, session.attempt, len(session.tokens), prefix_hash, length)
