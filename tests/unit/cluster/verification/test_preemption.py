"""Sessions that outgrow the cache are preempted, resume, and get the same tokens; `Target` checks every page."""

import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.page_allocator import OwnPages, page_hash
from cluster.verification.admission import Admission
from cluster.verification.block_buffer import BlockBuffer, BufferLimits, TargetCounts
from cluster.verification.sequence import DrafterAccess, TargetSequence
from protos.draft_tree import DraftTree
from protos.messages import Finish, Verdict
from protos.prefix import Prefix
from tests.scenarios.verification import DRAFTER, ROUTER, VOCABULARY, Target, Tokens, next_token, text
from tests.unit.cluster.samples import KEY, an_open

PROMPTS = {"a": (0, 1, 2, 3), "b": (10, 11, 12, 13), "c": (20, 21, 22, 23)}


def verdicts(target: Target, receiver: str = ROUTER) -> list[Verdict]:
    """Runs a step; returns the receiver's verdicts."""
    return [message for to, message in target.step() if to == receiver and isinstance(message, Verdict)]


def crowded() -> Target:
    """Returns a target with three admitted sessions that will outgrow its cache."""
    target = Target(pages=9)
    for name, prompt in PROMPTS.items():
        target.open(name, tokens=prompt, max_len=24)
    assert target.scheduler.load()["sessions"] == 3.0
    return target


def preempting() -> Target:
    """Returns a crowded target that has just preempted a session."""
    target = crowded()
    while not target.scheduler.admission.preempted:
        target.step()
    return target


def test_a_full_cache_preempts_the_youngest_session_and_no_token_is_lost():
    target = crowded()
    got: dict[str, Tokens] = dict.fromkeys(PROMPTS, ())
    while not target.scheduler.admission.preempted:
        for verdict in verdicts(target):
            got[verdict.session] += verdict.tokens
    assert {row.session for row in target.rows[-1]} == {"a", "b"}
    assert target.scheduler.load() == {"sessions": 2.0, "queued": 1.0}
    for name, rest in target.finish().items():
        got[name] += rest
    assert got == {name: text(prompt, 20) for name, prompt in PROMPTS.items()}
    rows_of_c = [row for rows in target.rows for row in rows if row.session == "c"]
    assert sum(row.start == 0 for row in rows_of_c) > 1, "the evicted tokens are computed again"


def test_a_preempted_session_keeps_its_drafter_and_its_waiting_block():
    target = crowded()
    tokens: Tokens = PROMPTS["c"]
    target.attach(tokens, "c")
    while not target.scheduler.admission.preempted:
        for verdict in verdicts(target, DRAFTER):
            tokens += verdict.tokens
    target.block(tokens, text(tokens, 2), "c")
    while not (found := verdicts(target, DRAFTER)):
        pass
    (verdict,) = found
    assert (verdict.base_len, verdict.accepted, verdict.tokens) == (len(tokens), 2, text(tokens, 3))


def test_a_preempted_session_is_closed_in_the_engine_once():
    target = preempting()
    target.close("c")
    target.close("c")
    closes: list[str] = []
    while (plan := target.scheduler.plan(target.now)) is not None:
        closes += plan.closes
        target.scheduler.apply(target.compute(plan), 0.1, target.now)
    assert sorted(closes) == ["a", "b", "c"]
    assert target.scheduler.is_idle


def test_a_preempted_session_that_is_opened_again_replaces_itself_in_the_engine():
    target = preempting()
    target.open("c", tokens=(30, 31), max_len=6, attempt=2)
    assert target.finish()["c"] == text((30, 31), 4)


def a_sequence(name: str, tokens: Tokens) -> TargetSequence:
    request = an_open(name, tokens=tokens)
    buffer = BlockBuffer(BufferLimits(), TargetCounts())
    return TargetSequence(request, ROUTER, Prefix(KEY, tokens), buffer, DrafterAccess(request))


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 8)), min_size=1, max_size=60), st.integers(4, 12))
def test_the_oldest_session_never_loses_its_pages(grows, pages):
    """Each step opens a session and has one of the running ones grow."""
    admission = Admission(6, OwnPages(pages, 4, b"key"))
    for number, (index, tokens) in enumerate(grows):
        admission.waiting[f"s{number}"] = a_sequence(f"s{number}", (number % 50,))
        list(admission.admit())
        oldest, *_ = admission.running
        name = [*admission.running][index % len(admission.running)]
        session = admission.running[name]
        end = min(session.cache.length + tokens, 4 * pages)
        if end > session.cache.length and admission.reserve(session, session.cache.length, end, set()) is not None:
            session.cache.length = end
        assert next(iter(admission.running)) == oldest
        if admission.running[oldest].cache.length == 4 * pages:
            admission.forget(oldest)


def test_the_cached_pages_of_a_blocked_session_are_not_searched_in_vain():
    """Their hashes take milliseconds per step if the session is long."""
    hashed = []

    def hash_page(key: bytes, parent: bytes, tokens: Sequence[int]) -> bytes:
        hashed.append(tokens)
        return page_hash(key, parent, tokens)

    admission = Admission(6, OwnPages(4, 4, b"key", hash_page))
    for name in ("running", "blocked"):
        admission.waiting[name] = a_sequence(name, tuple(range(12)))
    assert [session.open.session for session in admission.admit()] == ["running"]
    tried = len(hashed)
    assert tried
    assert not list(admission.admit())
    assert len(hashed) == tried
    admission.forget("running")
    assert [session.open.session for session in admission.admit()] == ["blocked"]


@given(
    prompts=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=14), min_size=2, max_size=6),
    pages=st.integers(6, 14),
    max_step_tokens=st.integers(1, 16),
    seed=st.integers(0, 2**32),
)
def test_every_session_gets_its_text_however_small_the_cache(prompts, pages, max_step_tokens, seed):
    """Sessions share pages, are preempted, roll back, and close before their end."""
    rng = random.Random(seed)
    target = Target(pages=pages, max_sessions=6, max_step_tokens=max_step_tokens)
    tokens = {f"s{i}": tuple(prompt) for i, prompt in enumerate(prompts)}
    wanted = {name: prompt + text(prompt, 9) for name, prompt in tokens.items()}
    waiting = sorted(tokens)
    for _ in range(1000):
        if waiting and rng.random() < 0.5:
            name = waiting.pop()
            target.open(name, tokens=tokens[name], max_len=len(wanted[name]))
        for name in target.known:
            draft = [*text(tokens[name], 3)]
            if rng.random() < 0.5:
                draft[rng.randrange(3)] = rng.randrange(VOCABULARY)
            if rng.random() < 0.5:
                target.block(tokens[name], tuple(draft), name)
            if rng.random() < 0.01:
                target.close(name)
                wanted[name] = tokens[name]
        plan = target.scheduler.plan(target.now)
        if plan is None and not waiting:
            break
        for _, message in target.scheduler.apply(target.compute(plan), 0.1, target.now) if plan is not None else ():
            assert isinstance(message, Verdict)
            tokens[message.session] += message.tokens
    target.scheduler.plan(target.now + 3600)  # expires blocks for ended sessions
    assert target.scheduler.is_idle
    assert not target.known
    assert tokens == wanted


# ---------------------------------------------------------------- trees


@pytest.mark.parametrize("page_size", [1, 2, 3, 16])
@pytest.mark.parametrize("positions", [400, 48], ids=["pages for all", "preemption"])
def test_sessions_with_random_trees_get_their_texts_with_any_page_size(page_size, positions):
    """Sessions share prompts, and pages end within accepted paths."""
    target = Target(pages=positions // page_size, page_size=page_size)
    rng = random.Random(page_size)
    prompts = {"old": (1, 2, 3, 4), "twin": (1, 2, 3, 4), "young": (4, 5, 6)}
    for name, prompt in prompts.items():
        target.open(name, tokens=prompt, max_len=30, draft_tokens=6)
        target.attach(prompt, name)
    got: dict[str, Tokens] = dict.fromkeys(prompts, ())
    branches = 0
    while any(target.scheduler.load().values()):
        for verdict in verdicts(target):
            branches += verdict.accepted > 1
            got[verdict.session] += verdict.tokens
            before = prompts[verdict.session] + got[verdict.session]
            room = min(6, 30 - len(before) - 1)
            if room > 0 and verdict.finish is Finish.NONE:
                target.block(before, a_likely_tree(rng, before, room), verdict.session)
    assert got == {name: text(prompt, 30 - len(prompt)) for name, prompt in prompts.items()}
    assert branches > 3, "too few paths were accepted to prove anything"
    assert (target.scheduler.admission.preempted > 0) == (positions < 400)


def a_likely_tree(rng: random.Random, before: Tokens, nodes: int) -> DraftTree:
    """Returns a tree with about half of its nodes correct."""
    texts: dict[Tokens, int] = {before: -1}  # node number by the text up to the node
    parents: list[int] = []
    while len(parents) < nodes:
        line = rng.choice([*texts])
        child = (*line, next_token(line) if rng.random() < 0.5 else rng.randrange(VOCABULARY))
        if child not in texts:
            parents.append(texts[line])
            texts[child] = len(parents) - 1
    return DraftTree(tuple(line[-1] for line in texts if len(line) > len(before)), tuple(parents))
