"""What a target hears of sessions with grammars: once they are compiled, and nothing of those that have gone."""

import asyncio
from dataclasses import replace

from actors.grammars.grammar_gate import GrammarGate
from protos.messages import Close, Hello, RefusalReason
from tests.unit.actors.sampling.processor_opens import opened


class Target:
    """Compiles when told to, and notes what reaches it."""

    def __init__(self):
        self.compiled = {}
        self.admitted = []
        self.refused = []
        self.gate = GrammarGate(self.prepare, lambda *one: self.admitted.append(one), self.refuse)

    async def prepare(self, grammar):
        return await self.compiled.setdefault(grammar, asyncio.get_running_loop().create_future())

    def refuse(self, stream, refusal):
        self.refused.append((stream, refusal.session, refusal.attempt, refusal.reason, refusal.message))

    async def ends(self, grammar, why=None):
        await asyncio.sleep(0)
        if not self.compiled[grammar].done():
            self.compiled[grammar].set_result(why)
        for _ in range(3):
            await asyncio.sleep(0)


REQUEST = opened(grammar="g")


async def test_a_session_comes_to_its_target_when_its_grammar_is_compiled():
    target = Target()
    assert target.gate.takes("r", REQUEST)
    await asyncio.sleep(0)
    assert target.admitted == []
    assert not target.gate.is_empty
    await target.ends("g")
    assert target.admitted == [("r", REQUEST)]
    assert target.gate.is_empty


async def test_all_else_passes_at_once():
    target = Target()
    for message in (opened(), Hello("r", "v", "t"), Close("s", 1)):
        assert not target.gate.takes("r", message)
    assert target.gate.is_empty


async def test_a_grammar_that_cannot_be_kept_to_refuses_its_session_alone():
    target = Target()
    other = replace(REQUEST, session="other", grammar="good")
    assert target.gate.takes("r", REQUEST)
    assert target.gate.takes("r", other)
    await target.ends("g", "it is malformed")
    await target.ends("good")
    assert target.refused == [
        ("r", "s", 1, RefusalReason.INVALID, "the grammar cannot be kept to: it is malformed"),
    ]
    assert target.admitted == [("r", other)]


async def test_a_session_that_is_closed_or_whose_stream_broke_meanwhile_never_comes():
    target = Target()
    for name in ("closed", "gone"):
        assert target.gate.takes(name, replace(REQUEST, session=name))
    await asyncio.sleep(0)  # both are being compiled
    assert not target.gate.takes("closed", Close("closed", 1))
    target.gate.gone("gone")
    assert target.gate.is_empty
    await target.ends("g")
    assert target.admitted == []


async def test_of_two_attempts_the_later_one_counts_whichever_comes_first():
    target = Target()
    later = replace(REQUEST, attempt=2)
    assert target.gate.takes("r", REQUEST)
    assert target.gate.takes("r", later)
    assert not target.gate.takes("r", Close("s", 1))  # of the first one: the second is still wanted
    await target.ends("g")
    assert target.admitted == [("r", later)]
