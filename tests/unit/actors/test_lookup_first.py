"""The model is asked exactly where the text itself has no answer."""

from collections.abc import Sequence
from dataclasses import replace

from actors.methods import TargetNeeds
from actors.methods.lookup_first import LookupFirst
from actors.methods.prompt_lookup import PromptLookup
from cluster.drafting import Proposal, Want
from protos.messages import Verdict
from tests.unit.cluster.samples import an_open

REPEATING, NEW = (5, 6, 7, 5, 6), (1, 2, 3, 4, 5)


class Asked:
    """A model that remembers what it was asked for."""

    needs = TargetNeeds()

    def __init__(self) -> None:
        self.sessions: list[str] = []
        self.closed: list[str] = []

    def propose(self, wants: Sequence[Want]) -> list[Proposal]:
        self.sessions += [want.open.session for want in wants]
        return [Proposal(w.open.session, len(w.tokens), w.prefix_hash, (9,), ahead=w.ahead) for w in wants]

    def observe(self, verdict: Verdict) -> None: ...

    def close(self, sessions: Sequence[str]) -> None:
        self.closed += sessions


def a_want(session: str, tokens: tuple[int, ...]) -> Want:
    return Want(an_open(session, tokens=tokens), tokens, 1, max_tokens=2)


def test_each_session_is_served_by_the_right_one_and_in_order() -> None:
    model = Asked()
    method = LookupFirst(PromptLookup(3, 2), model)
    wants = [a_want("new", NEW), a_want("repeating", REPEATING)]
    assert [p.tokens for p in method.propose(wants)] == [(9,), (7, 5)]
    assert model.sessions == ["new"]


def test_guesses_ahead_are_left_to_the_model() -> None:
    model = Asked()
    method = LookupFirst(PromptLookup(3, 2), model)
    (proposal,) = method.propose([replace(a_want("repeating", REPEATING), ahead=True)])
    assert proposal.ahead
    assert model.sessions == ["repeating"]


def test_closing_reaches_the_model() -> None:
    model = Asked()
    LookupFirst(PromptLookup(3, 2), model).close(["s"])
    assert model.closed == ["s"]
