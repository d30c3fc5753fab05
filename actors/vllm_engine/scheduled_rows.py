"""Conversion of what vLLM scheduled and sampled into rows and outcomes of the verification scheduler.

Pure: no vLLM types appear here.
"""

from collections.abc import Sequence

from cluster.verification.step import Outcome, Row
from protos.draft_tree import NO_TREE


def fed_row(planned: Row, tokens: Sequence[int], start: int, scheduled: int, drafted: int) -> Row:
    """Returns the fed part of a planned row: `scheduled` tokens from `start`, the last `drafted` of them drafts.

    `tokens` are all decided tokens of the session. vLLM chunks prompts itself and recomputes what preemption has lost.
    Hidden states are requested at the places of the planned row, as far as it was fed.
    """
    known = scheduled - drafted
    end = start + known
    assert end <= len(tokens), f"{planned.session} was fed {end} tokens, {len(tokens)} are decided"
    assert not drafted or end == len(tokens), f"{planned.session} was fed a draft in the middle of its text"
    draft = planned.draft.first(drafted) if drafted else NO_TREE
    decides = end == len(tokens)
    wanted = planned.state_places[: len(planned.state_places) - planned.drafted + drafted] if decides else ()
    fed = (*tokens[start:end], *draft.tokens)
    return Row(planned.session, fed, start, decides, planned.pages, draft, wanted)


def outcome_of(row: Row, sampled: Sequence[int]) -> Outcome | None:
    """Returns the outcome of a row: accepted draft tokens, then one more; None if the row only fed a prompt."""
    if not row.decide:
        return None
    accepted = len(sampled) - 1
    draft = row.draft.tokens
    assert 0 <= accepted <= len(draft), f"{row.session}: {len(sampled)} tokens came of a draft of {len(draft)}"
    assert tuple(sampled[:-1]) == draft[:accepted], f"{row.session}: tokens stand that were not drafted"
    return Outcome(row.session, tuple(range(accepted)), sampled[-1])
