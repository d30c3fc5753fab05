"""Tests the target's step: mixed rows, the logits of each row, and each session's fed tokens."""

import asyncio
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from actors.attention.batch import never
from actors.compute.kv_cache import InputRow
from actors.engine.executor import StepExecutor, within
from actors.models.decoder import ForwardOutput
from actors.sampling.draws import NO_DRAWS, Draws
from cluster.page_allocator import PageCopy, SlotMove
from cluster.verification.step import Outcome, Row, StepPlan
from protos.draft_tree import DraftTree
from protos.messages import Sampling, Scoring, TokenRules
from tests.toys import ToyRunner
from tests.unit.cluster.samples import an_open

VOCABULARY = 8
NEXT = {token: (token * 3 + 1) % VOCABULARY for token in range(VOCABULARY)}  # greedy successors


class SpyRunner(ToyRunner):
    """Runner that records its input."""

    def __init__(self, broken: int | None = None, value: float = torch.nan) -> None:
        """Initializes the spy; after the token `broken`, one logit has another value."""
        table = torch.zeros(VOCABULARY, VOCABULARY)
        for token, following in NEXT.items():
            table[token, following] = 1.0
        if broken is not None:
            table[broken, 2] = value
        super().__init__(table)
        self.fed: list[list[InputRow]] = []
        self.copied: list[tuple[PageCopy, ...]] = []
        self.moved: list[tuple[SlotMove, ...]] = []

    def forward(
        self,
        rows: Sequence[InputRow],
        copies: Sequence[PageCopy] = (),
        interrupted: Callable[[], bool] = never,
        moves: Sequence[SlotMove] = (),
        draws: Draws = NO_DRAWS,
    ) -> ForwardOutput:
        self.fed.append(list(rows))
        self.copied.append(tuple(copies))
        self.moved.append(tuple(moves))
        return super().forward(rows)


def a_row(session: str, tokens: tuple[int, ...], start: int, decide: bool = True, **more: Any) -> Row:
    return Row(session, tokens, start, decide, pages=(0,), **more)


def an_executor() -> StepExecutor:
    return StepExecutor(SpyRunner(), VOCABULARY)


def test_rows_of_mixed_kinds_and_lengths_are_decided_each_from_its_own_logits():
    """One forward pass contains a prefill chunk, a block, a single token and a whole prompt."""
    runner = SpyRunner()
    executor = StepExecutor(runner, runner.vocabulary)
    opens = tuple(an_open(name, tokens=(1, 2, 3)) for name in ("chunk", "block", "single", "prompt"))
    executor.step(StepPlan((), opens, (a_row("block", (2,), 0, False), a_row("single", (5,), 0, False))))
    right = (NEXT[4], NEXT[NEXT[4]])
    rows = (
        a_row("chunk", (1, 2, 3), 0, decide=False),
        a_row("block", (4, *right, 6), 1, draft=DraftTree.chain((*right, 6))),
        a_row("single", (6,), 1),
        a_row("prompt", (7, 3), 0),
    )
    assert executor.step(StepPlan((), (), rows)) == [
        Outcome("block", (0, 1), NEXT[right[1]]),
        Outcome("single", (), NEXT[6]),
        Outcome("prompt", (), NEXT[3]),
    ]
    assert [row.logits for row in runner.fed[-1]] == [0, 4, 1, 1]


def test_a_tree_is_fed_with_its_parents_and_decided_along_the_target_s_path():
    runner = SpyRunner()
    executor = StepExecutor(runner, runner.vocabulary)
    right = NEXT[4]
    wrong = (right + 1) % VOCABULARY
    tree = DraftTree((wrong, 0, right, NEXT[right], 6), (-1, 0, -1, 2, 2))
    row = a_row("s", (4, *tree.tokens), 2, draft=tree)
    (outcome,) = executor.step(StepPlan((), (an_open("s", tokens=(1, 2, 4)),), (row,)))
    assert outcome == Outcome("s", (2, 3), NEXT[NEXT[right]])
    assert outcome.tokens_of(row) == (right, NEXT[right], NEXT[NEXT[right]])
    assert runner.fed[-1] == [InputRow((4, *tree.tokens), 2, 6, (0,), parents=tree.parents)]


def test_penalties_follow_the_accepted_path_not_its_siblings():
    """The next step's penalties use the accepted tokens, which were not fed consecutively."""
    sampling = Sampling(temperature=0.0, presence_penalty=2.0)
    executor = an_executor()
    right = NEXT[4]
    others = [token for token in range(VOCABULARY) if token not in (4, right, NEXT[right])]
    tree = DraftTree((*others, right), (-1,) * (len(others) + 1))
    row = a_row("s", (4, *tree.tokens), 1, draft=tree)
    (outcome,) = executor.step(StepPlan((), (an_open("s", tokens=(2, 4), prompt_len=1, sampling=sampling),), (row,)))
    assert outcome == Outcome("s", (len(others),), NEXT[right])
    (after,) = executor.step(StepPlan((), (), (a_row("s", (NEXT[right],), 3),)))
    assert after.next_token == NEXT[NEXT[right]], "it was neither in the prompt nor accepted"


def test_pages_copies_and_moves_reach_the_runner_as_they_were_planned():
    runner = SpyRunner()
    executor = StepExecutor(runner, runner.vocabulary)
    opens = (an_open("a", tokens=(1, 2, 3)), an_open("b", tokens=(1, 2, 3)))
    rows = (Row("a", (2, 3), 1, True, pages=(4, 0)), Row("b", (1,), 0, False, pages=(7,)))
    copies = (PageCopy(1, 0), PageCopy(2, 7))
    moves = (SlotMove(9, 8),)
    executor.step(StepPlan((), opens, rows, copies, moves))
    assert runner.fed == [[InputRow((2, 3), 1, 1, (4, 0)), InputRow((1,), 0, 0, (7,))]]
    assert runner.copied == [copies]
    assert runner.moved == [moves]


def test_sessions_are_remembered_until_they_are_closed():
    runner = SpyRunner()
    executor = StepExecutor(runner, runner.vocabulary)
    assert executor.step(StepPlan((), (an_open("a"), an_open("b")), ())) == []
    assert not runner.fed, "without rows nothing is computed"
    executor.step(StepPlan(("a",), (an_open("c"),), (a_row("b", (1,), 0), a_row("c", (2,), 0))))
    assert not executor.is_idle
    executor.step(StepPlan(("b", "c"), (), ()))
    assert executor.is_idle


def test_a_session_that_is_open_cannot_be_opened_nor_an_unknown_one_closed():
    executor = an_executor()
    executor.step(StepPlan((), (an_open("a"),), ()))
    with pytest.raises(AssertionError, match="open already"):
        executor.step(StepPlan((), (an_open("a"),), ()))
    with pytest.raises(KeyError):
        executor.step(StepPlan(("b",), (), ()))


def test_a_session_may_be_closed_and_opened_again_in_one_step():
    executor = an_executor()
    executor.step(StepPlan((), (an_open("a"),), (a_row("a", (1, 2), 0),)))
    row = a_row("a", (3,), 0)
    assert executor.step(StepPlan(("a",), (an_open("a", attempt=2),), (row,))) == [Outcome("a", (), NEXT[3])]


def test_a_row_beyond_its_sessions_tokens_raises():
    executor = an_executor()
    with pytest.raises(AssertionError, match="beyond what is cached"):
        executor.step(StepPlan((), (an_open("a", tokens=(1, 2)),), (a_row("a", (1,), 3),)))


def test_a_row_may_begin_where_another_sessions_pages_end_also_after_a_chunk_of_its_own():
    """A session that lost its pages may find more of its prompt in the pages of another session."""
    executor = an_executor()
    prompt = (1, 2, 3, 4, 5, 6)
    executor.step(StepPlan((), (an_open("a", tokens=prompt),), (a_row("a", prompt[:2], 0, False),)))
    assert executor.step(StepPlan((), (), (a_row("a", prompt[5:], 5),))) == [Outcome("a", (), NEXT[6])]


def test_penalties_count_generated_tokens_only_and_forget_what_was_rolled_back():
    """Penalties exclude prompt tokens and rejected draft tokens, and include tokens generated before a reopening."""
    sampling = Sampling(temperature=0.0, presence_penalty=2.0)
    executor = an_executor()
    # The prompt is (2,); 7, the successor of 2, and 1 were generated before the session was reopened here.
    opened = an_open("a", tokens=(2, 7, 1), prompt_len=1, sampling=sampling)
    rejected = a_row("a", (2, 7, 1, 0), 0, draft=DraftTree.chain((0,)))
    (outcome,) = executor.step(StepPlan((), (opened,), (rejected,)))
    assert outcome == Outcome("a", (), NEXT[1])
    (outcome,) = executor.step(StepPlan((), (), (a_row("a", (NEXT[1], 2), 3),)))
    assert outcome.next_token == 0, "the lowest id without a penalty: 7 has one, the rejected 0 has none"


def test_penalties_of_a_prefix_that_was_not_fed_here_count_all_the_same():
    """The ledger's tokens are known even if another session computed their pages."""
    sampling = Sampling(temperature=0.0, presence_penalty=2.0)
    opened = an_open("a", tokens=(2, 7, 1), prompt_len=1, sampling=sampling)
    (outcome,) = an_executor().step(StepPlan((), (opened,), (a_row("a", (1,), 2),)))
    assert outcome.next_token == NEXT[1] == 4
    opened = an_open("a", tokens=(2, 4, 1), prompt_len=1, sampling=sampling)
    (outcome,) = an_executor().step(StepPlan((), (opened,), (a_row("a", (1,), 2),)))
    assert outcome.next_token == 0, "4 was generated before"


def test_a_minimum_length_may_have_end_ids_that_are_never_drawn():
    """Such as an end id of a padding row of the embedding, which the tokenizer lacks."""
    rules = TokenRules(min_len=3)
    opened = an_open("a", tokens=(2,), stop_ids=(VOCABULARY, NEXT[2]), rules=rules, sampling=Sampling(temperature=0.0))
    (outcome,) = an_executor().step(StepPlan((), (opened,), (a_row("a", (2,), 0),)))
    assert outcome.next_token == 0, "the lowest id, since the end id is still forbidden"


def test_noise_is_addressed_by_absolute_position():
    """A reopening does not change the draws at the same positions; other positions have other draws."""
    sampling = Sampling(temperature=1.0)

    def drawn(prompt_len: int, fed: tuple[int, ...]) -> list[int]:
        executor = StepExecutor(ToyRunner(torch.zeros(VOCABULARY, VOCABULARY)), VOCABULARY)
        opens = tuple(
            an_open(str(seed), tokens=fed, prompt_len=prompt_len, sampling=sampling, seed=seed) for seed in range(30)
        )
        rows = tuple(a_row(str(seed), fed, 0) for seed in range(30))
        return [outcome.next_token for outcome in executor.step(StepPlan((), opens, rows))]

    assert drawn(1, (1, 2)) == drawn(2, (1, 2)) == drawn(2, (3, 4))
    assert drawn(1, (1, 2)) != drawn(1, (1,))


def test_an_audit_that_names_a_rival_gets_the_margin_to_it():
    """The cases include rows without a rival, one of them with a draft; each row has its own logits."""
    executor = an_executor()
    right = NEXT[4]
    opens = (
        an_open("block", tokens=(1, 2, 4)),
        an_open("asks", tokens=(3,), max_len=2, audit=True, rival=5),
        an_open("tie", tokens=(3,), max_len=2, audit=True, rival=NEXT[3]),
    )
    block = a_row("block", (4, right, 6), 2, draft=DraftTree.chain((right, 6)))
    outcomes = executor.step(StepPlan((), opens, (block, a_row("asks", (3,), 0), a_row("tie", (3,), 0))))
    assert [outcome.margin for outcome in outcomes] == [None, 1.0, 0.0]
    assert [outcome.next_token for outcome in outcomes[1:]] == [NEXT[3], NEXT[3]]


# ---------------------------------------------------------------- scores


def expected_score(after: int, token: int) -> float:
    """Returns the score under the spy's logits: 1 for the successor, 0 for all others."""
    return float(torch.log_softmax(torch.eye(VOCABULARY)[NEXT[after]], dim=-1)[token])


def test_decided_tokens_are_scored_at_their_tree_nodes():
    right = NEXT[4]
    wrong = (right + 1) % VOCABULARY
    tree = DraftTree((wrong, right, NEXT[right], 6), (-1, -1, 1, 1))
    rows = (a_row("plain", (1,), 0), a_row("scored", (4, *tree.tokens), 2, draft=tree), a_row("other", (5,), 0))
    opens = (
        an_open("plain", tokens=(1,)),
        an_open("scored", tokens=(1, 2, 4), scoring=Scoring(2)),
        an_open("other", tokens=(5,), scoring=Scoring(0)),
    )
    plain, scored, other = an_executor().step(StepPlan((), opens, rows))
    assert plain.scores == ()
    decided = (4, *scored.tokens_of(rows[1]))
    found = [score.logprob for score in scored.scores]
    assert found == pytest.approx([expected_score(*pair) for pair in itertools.pairwise(decided)])
    assert [score.top_ids[0] for score in scored.scores] == list(decided[1:])
    assert [len(score.top_ids) for score in (*scored.scores, *other.scores)] == [2, 2, 2, 0]


def test_scores_use_the_logits_before_rules():
    request = an_open("s", tokens=(4,), scoring=Scoring(1), rules=TokenRules(logit_bias=((NEXT[4], -100.0),)))
    (outcome,) = an_executor().step(StepPlan((), (request,), (a_row("s", (4,), 0),)))
    assert outcome.next_token != NEXT[4]
    (score,) = outcome.scores
    assert score.logprob == pytest.approx(expected_score(4, outcome.next_token))
    assert score.top_ids == (NEXT[4],)


def test_a_prompt_is_scored_chunk_by_chunk_and_sent_with_the_first_decision_alone():
    """This also holds after a loss of its pages in between, and next to rows without scores."""
    prompt = (1, 6, 2, 5, 3)
    executor = an_executor()
    opens = (an_open("s", tokens=prompt, scoring=Scoring(None, 1)), an_open("plain", tokens=(1, 2)))
    executor.step(StepPlan((), opens, (a_row("plain", (1,), 0, False), a_row("s", prompt[:2], 0, False))))
    executor.step(StepPlan((), (), (a_row("s", prompt[:3], 0, False), a_row("plain", (2,), 1))))
    block = (NEXT[3], 0)
    row = a_row("s", (*prompt[3:], *block), 3, draft=DraftTree.chain(block))
    plain, outcome = executor.step(StepPlan((), (), (a_row("plain", (7,), 2), row)))
    assert plain == Outcome("plain", (), NEXT[7])
    assert outcome.path == (0,)
    assert outcome.scores == ()
    found = [score.logprob for score in outcome.prompt_scores]
    assert found == pytest.approx([expected_score(*pair) for pair in itertools.pairwise(prompt)])
    (again,) = executor.step(StepPlan((), (), (a_row("s", (*prompt, NEXT[3], outcome.next_token), 0),)))
    assert again.prompt_scores == ()


def test_a_session_that_goes_on_elsewhere_does_not_send_its_prompt_scores_again():
    request = an_open("s", tokens=(1, 2, 3), prompt_len=2, scoring=Scoring(None, 1))
    (outcome,) = an_executor().step(StepPlan((), (request,), (a_row("s", (1, 2, 3), 0),)))
    assert outcome == Outcome("s", (), NEXT[3])


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("sampling", [Sampling(temperature=0.0), Sampling(), Sampling(temperature=0.5, top_p=0.8)])
def test_nonfinite_logits_fail_their_own_session_and_no_other(value: float, sampling: Sampling) -> None:
    right = NEXT[4]
    rows = (
        a_row("before", (6,), 0),
        a_row("plain", (5,), 0),
        a_row("block", (4, right, 5), 0, draft=DraftTree.chain((right, 5))),
        a_row("chunk", (5,), 0, decide=False),
        a_row("scored", (3,), 0),
        a_row("after", (7,), 0),
    )
    scoring = {"scored": Scoring(1), "plain": Scoring(1)}
    opens = tuple(
        an_open(row.session, tokens=(1, 2), sampling=sampling, scoring=scoring.get(row.session, Scoring()))
        for row in rows
    )
    expected = an_executor().step(StepPlan((), opens, rows))
    executor = StepExecutor(SpyRunner(5, value), VOCABULARY)
    found = executor.step(StepPlan((), opens, rows))
    assert [outcome.is_finite for outcome in found] == [True, False, False, True, True]
    assert [outcome for outcome in found if outcome.is_finite] == [expected[0], *expected[3:]]
    assert [outcome.token_count for outcome in found if not outcome.is_finite] == [0, 0]
    executor.step(StepPlan(tuple(row.session for row in rows), (), ()))
    assert executor.is_idle


def test_the_executor_checks_logits_before_rules_mask_them() -> None:
    """A rule that masks the broken token must not hide the model's fault."""
    rules = TokenRules(allowed=(1, 3))
    request = an_open("s", tokens=(5,), rules=rules)
    (outcome,) = StepExecutor(SpyRunner(5, torch.nan), VOCABULARY).step(
        StepPlan((), (request,), (a_row("s", (5,), 0),))
    )
    assert not outcome.is_finite


def test_nonfinite_logits_in_a_scored_prompt_fail_its_session() -> None:
    """The cases include an earlier chunk, whose scores are sent with the first decision."""
    executor = StepExecutor(SpyRunner(5, torch.inf), VOCABULARY)
    opens = (
        an_open("s", tokens=(1, 5, 2, 3), scoring=Scoring(None, 1)),
        an_open("fine", tokens=(1, 4, 2, 3), scoring=Scoring(None, 1)),
    )
    executor.step(StepPlan((), opens, (a_row("s", (1, 5), 0, False), a_row("fine", (1, 4), 0, False))))
    bad, fine = executor.step(StepPlan((), (), (a_row("s", (2, 3), 2), a_row("fine", (2, 3), 2))))
    assert bad == Outcome("s", (), 0, is_finite=False)
    assert fine.is_finite
    assert len(fine.prompt_scores) == 3


def test_a_prompt_s_scores_outlast_a_draft_with_nonfinite_logits() -> None:
    """The row is computed again without the draft."""
    executor = StepExecutor(SpyRunner(5, torch.nan), VOCABULARY)
    opened = an_open("s", tokens=(1, 2, 3), scoring=Scoring(None, 1))
    (bad,) = executor.step(StepPlan((), (opened,), (a_row("s", (1, 2, 3, 5), 0, draft=DraftTree.chain((5,))),)))
    (good,) = executor.step(StepPlan((), (), (a_row("s", (1, 2, 3), 0),)))
    assert (bad.is_finite, good.is_finite, good.next_token) == (False, True, NEXT[3])
    assert len(good.prompt_scores) == 2


# ---------------------------------------------------------------- limits


@pytest.fixture
async def stands_still(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Returns a list of simulated stalls in seconds, which advance the event loop's clock."""
    stops: list[float] = []
    loop = asyncio.get_running_loop()
    time = loop.time
    monkeypatch.setattr(loop, "time", lambda: time() + sum(stops))
    return stops


async def test_work_within_the_limit_finishes() -> None:
    assert await within(1e6, asyncio.sleep(0, result=7)) == 7


async def test_endless_work_times_out() -> None:
    work = asyncio.get_running_loop().create_future()
    with pytest.raises(TimeoutError, match="no result within 0 s"):
        await within(0.0, work)
    assert work.cancelled()


async def test_a_failure_and_a_cancellation_pass_through() -> None:
    failed = asyncio.get_running_loop().create_future()
    failed.set_exception(ZeroDivisionError())
    with pytest.raises(ZeroDivisionError):
        await within(10.0, failed)
    endless = asyncio.get_running_loop().create_future()
    waiting = asyncio.ensure_future(within(10.0, endless))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert endless.cancelled()


async def test_work_finished_soon_after_a_suspension_is_in_time(stands_still: list[float]) -> None:
    async def answer() -> str:
        stands_still.append(1e6)
        for _ in range(10):  # until the waiter reads the clock
            await asyncio.sleep(0)
        return "late, but there"

    assert await within(10.0, answer()) == "late, but there"


async def test_a_hanging_task_times_out(stands_still: list[float]) -> None:
    work = asyncio.get_running_loop().create_future()
    waiting = asyncio.ensure_future(within(100.0, work))
    while not waiting.done():
        stands_still.append(0.2)
        await asyncio.sleep(0)
    assert isinstance(waiting.exception(), TimeoutError)
    assert 100.0 <= sum(stands_still) <= 200.0
