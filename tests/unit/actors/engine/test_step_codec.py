"""Tests the encoding of step plans and outcomes between a coordinator and its rank."""

import random
from dataclasses import replace

from actors.engine.step_codec import StepDecoder, StepEncoder
from cluster.page_allocator import PageCopy, SlotMove
from cluster.verification.step import Outcome, Row, StateRead, StepPlan
from protos.draft_tree import NO_TREE, DraftTree, SparseProbs
from protos.messages import Acceptance, Open, Sampling, TokenRules, TokenScore

TREE = DraftTree((4, 5, 6), (-1, -1, 0))
PROBS = DraftTree.chain((7, 8), SparseProbs(((7, 1), (8, 2)), ((3, 9), (1, 0))))
DRAFTS = (NO_TREE, DraftTree.chain((3,)), DraftTree.chain((3, 4, 5)), TREE, PROBS)


def an_open(name: str) -> Open:
    opened = Open.measured(name, (1, 2, 3), 64, 4, Sampling(temperature=0.7, top_p=0.9))
    rules = TokenRules(logit_bias=((3, 1.5),), bad_words=((1, 2),))
    return replace(opened, stop_ids=(2,), grammar="start: /a/", rules=rules, acceptance=Acceptance.REJECTION)


def a_row(name: str, draft: DraftTree, pages: tuple[int, ...], draws: random.Random) -> Row:
    known = tuple(draws.choices(range(100), k=draws.choice((1, 1, 5))))
    slots = tuple(range(draws.choice((0, 0, 3))))
    decides = bool(len(draft)) or draws.random() < 0.8
    return Row(name, known + draft.tokens, draws.randrange(50), decides, pages, draft, slots)


def an_outcome(row: Row, draws: random.Random) -> Outcome:
    path = draws.choice(([], [0], [0, 1], [0, 2], [1]))
    plain = Outcome(row.session, tuple(node for node in path if node < row.drafted), draws.randrange(100))
    score = TokenScore(-0.5, 1, (2,), (-0.5,))
    extras = ({}, {}, {}, {"scores": (score,)}, {"states": b"ab"}, {"margin": 0.0}, {"is_finite": False})
    return replace(plain, **draws.choice(extras))


def test_plans_and_outcomes_arrive_unchanged_while_sessions_and_page_tables_change() -> None:
    draws = random.Random(3)
    encoder = StepEncoder()
    decoder = StepDecoder()
    tables: dict[str, tuple[int, ...]] = {}
    for step in range(400):
        closes = tuple(draws.sample(sorted(tables), min(len(tables), draws.choice((0, 0, 0, 1, 2)))))
        for name in closes:
            del tables[name]
        reopened = [name for name in closes if draws.random() < 0.5]
        opens = tuple(an_open(name) for name in [*reopened, *[f"s{step}"] * (len(tables) < 6)])
        tables |= {request.session: () for request in opens}
        rows = []
        for name, pages in tables.items():
            cut = draws.choice((0, 0, 0, 1, 2))
            grown = tuple(draws.choices(range(1000), k=draws.choice((0, 0, 1, 2))))
            tables[name] = pages[: len(pages) - cut] + grown
            if draws.random() < 0.8:
                rows.append(a_row(name, draws.choice(DRAFTS), tables[name], draws))
        copies = (PageCopy(1, 2),) * draws.choice((0, 2))
        moves = (SlotMove(3, 4), SlotMove(5, 6))[: draws.choice((0, 1, 2))]
        plan = StepPlan(closes, opens, tuple(rows), copies, moves)
        assert decoder.request(encoder.step(plan)) == plan
        outcomes = [an_outcome(row, draws) for row in rows if row.decide]
        assert encoder.outcomes(decoder.outcomes(outcomes)) == outcomes


def test_an_unchanged_page_table_is_not_sent_again() -> None:
    encoder = StepEncoder()
    pages = tuple(range(10_000))
    first = encoder.step(StepPlan((), (an_open("s"),), (Row("s", (1,), 5, True, pages),)))
    again = encoder.step(StepPlan((), (), (Row("s", (1,), 5, True, pages),)))
    longer = encoder.step(StepPlan((), (), (Row("s", (1,), 5, True, (*pages, 7)),)))
    assert len(first) > 40_000
    assert len(again) < 100
    assert len(longer) == len(again) + 4


def test_a_read_of_states_carries_its_slots() -> None:
    read = StepDecoder().request(StepEncoder().read(StateRead("s", 4, (9, 8))))
    assert isinstance(read, StateRead)
    assert read.slots == (9, 8)
