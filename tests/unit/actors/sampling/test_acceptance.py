"""The batched decision of a step equals the reference's decision of each block."""

from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from actors.attention.flat_rows import FlatRows
from actors.compute.input_row import InputRow
from actors.sampling.acceptance import (
    NOT_DECIDED,
    BlockDecision,
    DrawAddress,
    PendingBlock,
    decide,
    decided_in_step,
    draws_of,
)
from actors.sampling.draws import DrawsOnDevice, draw_tokens, mark_reached
from actors.sampling.logits_processors import ProcessorChain, chain_of, paths_of
from actors.sampling.truncation import filtered
from protos.draft_tree import MAX_BLOCK_TOKENS, DraftTree, SparseProbs
from protos.messages import Acceptance, Sampling, TokenRules
from tests.sampling_reference import accept
from tests.unit.actors.sampling.processor_opens import opened
from tests.unit.trees import grown, trees

VOCABULARY = 12
SAMPLINGS = [
    Sampling(temperature=0.0),
    Sampling(temperature=0.0, frequency_penalty=0.7, presence_penalty=0.3),
    Sampling(),
    Sampling(temperature=0.6, presence_penalty=1.5),
    Sampling(top_k=3),
    Sampling(temperature=1.3, top_p=0.7),
    Sampling(min_p=0.2),
    Sampling(temperature=0.8, top_k=5, top_p=0.9, min_p=0.05),
    Sampling(temperature=0.8, top_k=5, repetition_penalty=1.3),
]
RULES = [
    TokenRules(),
    TokenRules(logit_bias=((3, 2.5),), bad_words=((1,), (2, 4)), min_len=4),
    TokenRules(allowed=(2, 4, 9)),
]
tokens = st.integers(0, VOCABULARY - 1)


@st.composite
def draft_probs(draw: st.DrawFn, draft: tuple[int, ...]) -> SparseProbs | None:
    if not draft or draw(st.booleans()):
        return None
    width = draw(st.integers(2, 4))
    ids = []
    weights = []
    for token in draft:
        others = draw(st.permutations([t for t in range(VOCABULARY) if t != token]))
        padding = draw(st.integers(0, width - 1))
        ids.append((token, *others[: width - 1 - padding], *[0] * padding))
        weights.append((*draw(st.tuples(*[st.integers(1, 9)] * (width - padding))), *[0] * padding))
    return SparseProbs(tuple(ids), tuple(weights))


def a_chain(sampling: Sampling, generated: list[int], rules: TokenRules) -> ProcessorChain | None:
    chain = chain_of(opened(sampling, (3, 7), rules=rules, stop_ids=(5,)))
    if chain is not None:
        chain.follow((3, 7, *generated))
    return chain


@st.composite
def blocks(draw: st.DrawFn) -> PendingBlock:
    rule = draw(st.sampled_from(Acceptance))
    sampling = draw(st.sampled_from(SAMPLINGS))
    chain = tuple(draw(st.lists(tokens, max_size=4)))
    uses_draft_probs = rule is Acceptance.REJECTION and not sampling.greedy
    return PendingBlock(
        rule=rule,
        sampling=sampling,
        draft=DraftTree.chain(chain, draw(draft_probs(chain))) if uses_draft_probs else draw(trees(VOCABULARY, 6)),
        chain=a_chain(sampling, draw(st.lists(tokens, max_size=5)), draw(st.sampled_from(RULES))),
        at=DrawAddress(draw(st.integers(0, 2**64 - 1)), draw(st.integers(0, 3)), draw(st.integers(0, 999))),
    )


def one_by_one(step: list[PendingBlock], logits: Tensor) -> list[BlockDecision]:
    found = []
    for block, part in zip(step, logits.split([block.positions for block in step]), strict=True):
        rows = part if block.chain is None else block.chain.apply(part, paths_of(block.draft))
        processed = filtered(rows, block.sampling)
        found.append(accept(block.rule, block.sampling.greedy, processed, block.draft, block.at))
    return found


def some_logits(step: list[PendingBlock], seed: int) -> Tensor:
    """Returns coarse logits that favor the draft tokens: most are accepted, and ties occur."""
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(sum(block.positions for block in step), VOCABULARY, generator=generator) * 4).round() / 4
    begin = 0
    for block in step:
        for parent, token in zip(block.draft.parents, block.draft.tokens, strict=True):
            logits[begin + 1 + parent, token] += 1.5
        begin += block.positions
    return logits


@given(st.lists(blocks(), min_size=1, max_size=6), st.integers(0, 2**16))
def test_a_step_is_decided_as_its_blocks_one_by_one(step, seed):
    logits = some_logits(step, seed)
    assert decide(step, logits) == one_by_one(step, logits)


@given(st.lists(blocks(), min_size=1, max_size=4), st.integers(0, 2**16), st.data())
def test_a_block_is_decided_exhaustively_if_candidates_do_not_suffice(step, seed, data):
    """Thousands of further tokens are as likely as the others after some blocks, and next to impossible after some."""
    levels = [data.draw(st.sampled_from([-30.0, 0.0])) for _ in step]
    rows = torch.tensor([level for block, level in zip(step, levels, strict=True) for _ in range(block.positions)])
    further = torch.randn(len(rows), 3000, generator=torch.Generator().manual_seed(seed)).round() / 4
    logits = torch.cat([some_logits(step, seed), further + rows.unsqueeze(1)], dim=1)
    assert decide(step, logits) == one_by_one(step, logits)


def test_trees_of_a_step_are_accepted_along_more_than_their_first_chain():
    """Otherwise the equality tests would not cover trees."""
    blocks = [a_tree_block(seed) for seed in range(40)]
    found = decide(blocks, some_logits(blocks, 1))
    assert sum(decision.path != tuple(range(len(decision.path))) for decision in found) > 5


def a_tree_block(seed: int) -> PendingBlock:
    tree = grown(Random(seed), 6, VOCABULARY)
    return PendingBlock(Acceptance.COUPLED, SAMPLINGS[3], tree, None, DrawAddress(seed, 0, 3))


def accepted_on_device(step: list[PendingBlock], logits: Tensor) -> list[BlockDecision]:
    """Decides blocks as a captured step does, after a row without logits."""
    prompt = InputRow((1, 2, 3), 0, 0, (0,))
    rows = [
        InputRow((4, *b.draft.tokens), 3, b.positions, (0,), () if b.draft.is_chain else b.draft.parents) for b in step
    ]
    flat = FlatRows([prompt, *rows], 4 + MAX_BLOCK_TOKENS)
    fed, parents = torch.from_numpy(flat.tokens[flat.logit_at]), torch.from_numpy(flat.parents)
    own = draw_tokens(logits, DrawsOnDevice.of([torch.from_numpy(part) for part in draws_of(step).integers]))
    reached = mark_reached(own, fed, parents, flat.longest)
    return decided_in_step(step, torch.stack([own, reached.long()], dim=1))


@given(st.lists(st.tuples(trees(VOCABULARY, 8), st.sampled_from([SAMPLINGS[0], SAMPLINGS[2]])), min_size=1), st.data())
def test_a_step_accepts_on_the_device_what_the_reference_accepts(blocks, data):
    step = [
        PendingBlock(Acceptance.COUPLED, sampling, tree, None, DrawAddress(at, 0, 3))
        for at, (tree, sampling) in enumerate(blocks)
    ]
    logits = some_logits(step, data.draw(st.integers(0, 2**16)))
    assert accepted_on_device(step, logits) == one_by_one(step, logits)
    bad = data.draw(st.integers(0, len(step) - 1))
    first = sum(block.positions for block in step[:bad])
    logits[data.draw(st.integers(first, first + step[bad].positions - 1)), 2] = torch.nan
    assert accepted_on_device(step, logits) == decide(step, logits)


@pytest.mark.parametrize("accepted", [0, 1, 2, 63, 64, 65, 127, MAX_BLOCK_TOKENS])
def test_the_longest_blocks_are_accepted_on_the_device_up_to_their_first_wrong_token(accepted):
    tokens = tuple(at % VOCABULARY for at in range(MAX_BLOCK_TOKENS))
    block = a_block(Sampling(temperature=0.0), draft=tokens)
    logits = torch.zeros(block.positions, VOCABULARY)
    logits[range(MAX_BLOCK_TOKENS), tokens] = 1.0
    logits[accepted, (accepted + 5) % VOCABULARY] = 2.0
    decision = BlockDecision(tuple(range(accepted)), (accepted + 5) % VOCABULARY)
    assert accepted_on_device([block], logits) == [decision]


def test_nothing_to_decide_is_no_decision():
    """The step contains only prompt chunks."""
    assert decide([], torch.empty(0, VOCABULARY)) == []


def a_block(sampling: Sampling, rule: Acceptance = Acceptance.COUPLED, draft: tuple[int, ...] = (1, 2)) -> PendingBlock:
    return PendingBlock(rule, sampling, DraftTree.chain(draft), None, DrawAddress(1, 0, 3))


def test_all_decisions_of_a_step_reach_the_host_in_one_copy():
    """The host waits for the device once, regardless of the requests in the step."""
    copies = 0

    class Counted(Tensor):
        """Counts all copies from the device to the host."""

        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            nonlocal copies
            reads = (Tensor.tolist, Tensor.item, Tensor.__bool__, Tensor.__int__, Tensor.__float__, Tensor.nonzero)
            copies += function in reads
            return super().__torch_function__(function, types, args, kwargs or {})

    step = [a_block(sampling, rule) for sampling in SAMPLINGS for rule in Acceptance]
    logits = torch.randn(3 * len(step), VOCABULARY, generator=torch.Generator().manual_seed(1))  # no ties
    found = decide(step, logits.as_subclass(Counted))
    assert copies == 1
    assert found == one_by_one(step, logits)


def test_a_rejection_where_rounding_leaves_no_residual_is_decided_by_the_specification_too(monkeypatch):
    """With equal distributions and rejecting noise, both implementations draw the token from the target's row."""
    for module in ("actors.sampling.acceptance", "tests.sampling_reference"):
        monkeypatch.setattr(f"{module}.uniform_scalar", lambda _: 1.0)
    equal = SparseProbs(((0, 1, 2),), ((1, 1, 1),))
    drafted = DraftTree.chain((0,), equal)
    step = [
        PendingBlock(Acceptance.REJECTION, Sampling(), drafted, None, DrawAddress(seed, 0, 3)) for seed in range(40)
    ]
    row = torch.full((VOCABULARY,), -torch.inf)
    row[:3] = 0.0
    found = decide(step, row.repeat(2 * len(step), 1))
    assert found == one_by_one(step, row.repeat(2 * len(step), 1))
    assert {(decision.path, decision.next_token) for decision in found} == {((), 0), ((), 1), ((), 2)}


def test_a_vocabulary_too_large_to_be_worked_on_at_once_is_decided_the_same():
    step = [a_block(Sampling(), draft=(1, 2, 3, 4)) for _ in range(3)]
    logits = torch.randn(15, 50_000, generator=torch.Generator().manual_seed(3))
    logits[:, 1:5] += 12
    found = decide(step, logits)
    assert found == one_by_one(step, logits)
    assert any(decision.path for decision in found)


@given(st.lists(blocks(), min_size=1, max_size=6), st.integers(0, 2**16), st.data())
def test_nonfinite_logits_leave_only_their_own_block_undecided(step, seed, data):
    """NaN or +inf at any place of any of its rows, whatever rules would make of that token, or a row of -inf alone."""
    logits = some_logits(step, seed)
    expected = one_by_one(step, logits)
    bad = data.draw(st.integers(0, len(step) - 1))
    begin = sum(block.positions for block in step[:bad])
    row = begin + data.draw(st.integers(0, step[bad].positions - 1))
    value = data.draw(st.sampled_from([torch.nan, torch.inf, -torch.inf]))
    logits[row, slice(None) if value == -torch.inf else data.draw(tokens)] = value
    expected[bad] = NOT_DECIDED
    assert decide(step, logits) == expected


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_masked_logits_are_decided(sampling):
    """Some models set the logits of unused tokens to -inf."""
    chain = a_chain(sampling, [], TokenRules())
    block = PendingBlock(Acceptance.COUPLED, sampling, DraftTree.chain(()), chain, DrawAddress(1, 0, 2))
    logits = torch.full((1, VOCABULARY), -torch.inf)
    logits[0, 9] = 0.5
    assert decide([block], logits) == [BlockDecision((), 9)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("sampling", [Sampling(temperature=0.0), Sampling()], ids=["greedy", "drawn"])
def test_a_nonfinite_logit_is_found_anywhere_in_a_large_vocabulary(dtype, value, sampling):
    """The cases cover every lane of a vectorised maximum, and its remainder."""
    vocabulary = 1031
    block = PendingBlock(Acceptance.COUPLED, sampling, DraftTree.chain(()), None, DrawAddress(1, 0, 2))
    for at in (0, 1, 15, 16, 513, vocabulary - 1):
        logits = torch.zeros(2, vocabulary, dtype=dtype)
        logits[0, at] = value
        bad, good = decide([block, block], logits)
        assert (bad, good.is_finite) == (NOT_DECIDED, True)
