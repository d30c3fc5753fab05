"""Drafting from one state of the target: which row is read, what becomes of it, and what comes of its absence."""

import pytest
import torch

from actors.drafters.heads.last_state import MOST_ROWS, LastRows
from actors.sampling.gumbel import Purpose, gumbel, gumbel_argmax, key
from cluster.drafting.requests import Proposal
from protos.draft_tree import NO_TREE, DraftTree
from protos.messages import Acceptance, Sampling, Shape
from protos.prefix import Prefix
from tests.unit.actors.drafters.heads.eagle_fixtures import case, checkpoint
from tests.unit.actors.drafters.heads.state_drafting import TOP_K, StateReading, a_method, a_request, decided, drafted
from tests.unit.cluster.samples import KEY, an_open

MEDUSA = case("medusa")
SPECULATOR = case("mlp_speculator")
TOKENS = decided(MEDUSA)
LAST = len(TOKENS) - 2  # position of the state that the last decided token was drawn from
REJECTION = {"sampling": Sampling(), "acceptance": Acceptance.REJECTION}


@pytest.fixture(scope="module")
def medusa() -> StateReading:
    return a_method("medusa", checkpoint("medusa"))


@pytest.fixture(scope="module")
def speculator() -> StateReading:
    return a_method("mlp_speculator", checkpoint("mlp_speculator"))


def test_it_drafts_the_reference_s_tokens(medusa: StateReading, speculator: StateReading) -> None:
    proposal = drafted(medusa, TOKENS, 0, MEDUSA["features"], a_request(TOKENS))
    assert proposal.tree == DraftTree.chain(tuple(MEDUSA["medusa_top1"].tolist()))
    tokens = decided(SPECULATOR)
    proposal = drafted(speculator, tokens, LAST, SPECULATOR["features"].unsqueeze(0), a_request(tokens))
    assert proposal.tree == DraftTree.chain(tuple(SPECULATOR["chain_tokens"].tolist()))
    assert (medusa.tokens_per_forward, speculator.tokens_per_forward) == (5, 3)


def test_no_more_is_drafted_than_asked_for(speculator: StateReading) -> None:
    tokens = decided(SPECULATOR)
    rows = SPECULATOR["features"].unsqueeze(0)
    assert len(drafted(speculator, tokens, LAST, rows, a_request(tokens, most=2)).tokens) == 2


def test_a_session_whose_state_has_not_come_gets_nothing(medusa: StateReading) -> None:
    """A session of the same pass with its state gets a block."""
    for name in ("there", "early", "none"):
        medusa.open(an_open(name, tokens=TOKENS))
    medusa.states("there", 0, MEDUSA["features"])
    medusa.states("early", 0, MEDUSA["features"][:-1])
    requests = [a_request(TOKENS, session=name) for name in ("none", "there", "early")]
    found = medusa.draft(requests)
    medusa.close(["there", "early", "none"])
    nothing = [Proposal(name, len(TOKENS), Prefix(KEY, TOKENS).hash, NO_TREE) for name in ("none", "early")]
    assert [found[0], found[2]] == nothing
    assert found[1].tokens == tuple(MEDUSA["medusa_top1"].tolist())


def test_rows_come_in_any_order_and_twice_before_their_verdict_or_after(medusa: StateReading) -> None:
    rows = MEDUSA["features"]
    medusa.open(an_open(tokens=TOKENS[:4]))
    medusa.states("s", 8, rows[8:])
    medusa.states("s", 0, rows[:9])
    medusa.committed("s", TOKENS[4:9])
    medusa.states("s", 0, rows[:9])
    (proposal,) = medusa.draft([a_request(TOKENS[:9])])
    assert proposal.tokens == tuple(MEDUSA["medusa_logits_all"][:, 7].argmax(dim=-1).tolist())
    medusa.committed("s", TOKENS[9:])
    (proposal,) = medusa.draft([a_request(TOKENS)])
    assert proposal.tokens == tuple(MEDUSA["medusa_top1"].tolist())
    medusa.committed("s", (1,))
    (proposal,) = medusa.draft([a_request((*TOKENS, 1))])
    assert proposal.tokens == (), "its state has not come"
    medusa.close(["s"])


def test_rows_of_a_session_that_is_not_open_are_ignored(medusa: StateReading) -> None:
    medusa.states("other", 0, MEDUSA["features"])
    medusa.open(an_open("other", tokens=TOKENS))
    (proposal,) = medusa.draft([a_request(TOKENS, session="other")])
    medusa.close(["other"])
    assert proposal.tokens == ()


def test_only_wanted_rows_are_kept_and_no_more_than_so_many() -> None:
    rows = LastRows(torch.device("cpu"), torch.float32)
    given = torch.arange(2.0 * MOST_ROWS).unsqueeze(1)
    rows.keep("s", 10, given, wanted=12)
    assert rows.at("s", 11) is None
    kept = rows.at("s", 12)
    assert kept is not None
    assert kept.tolist() == [2.0]
    assert kept.untyped_storage().nbytes() == 4, "a row must not hold on to all that it came with"
    assert rows.at("s", 12 + MOST_ROWS - 1) is not None
    assert rows.at("s", 12 + MOST_ROWS) is None
    rows.forget_before("s", 20)
    assert rows.at("s", 19) is None
    assert rows.at("s", 20) is not None


def test_trees_of_heads_that_read_no_tokens_have_each_head_s_likeliest(medusa: StateReading) -> None:
    request = a_request(TOKENS, most=12, shape=Shape.TREE)
    tree = drafted(medusa, TOKENS, 0, MEDUSA["features"], request).tree
    assert len(tree) == 12
    assert not tree.is_chain
    probs = MEDUSA["medusa_logits_last"].softmax(dim=-1)
    for node, depth in enumerate(tree.depths):
        assert tree.tokens[node] in probs[depth].topk(4).indices.tolist()
    products = [float(probs[range(len(path)), [tree.tokens[node] for node in path]].prod()) for path in tree.paths]
    best = sorted(every_product(probs), reverse=True)[:12]
    assert products == pytest.approx(best, rel=0.5), "chances are calibrated ones, near the head's own"


def every_product(probs: torch.Tensor) -> list[float]:
    """Returns all paths through the four likeliest tokens of each of the first positions."""
    level = [1.0]
    found: list[float] = []
    for row in probs[:5]:
        level = [chance * each for chance in level for each in row.topk(4).values.tolist()]
        found += level
    return found


def test_trees_of_a_recurrent_head_go_on_from_tokens_beside_the_main_path(speculator: StateReading) -> None:
    tokens = decided(SPECULATOR)
    rows = SPECULATOR["features"].unsqueeze(0)
    tree = drafted(speculator, tokens, LAST, rows, a_request(tokens, most=12, shape=Shape.TREE)).tree
    assert tree.main_path[0] == SPECULATOR["chain_tokens"][0]
    assert tree.depth <= 3
    off = [path for path in tree.paths if tree.tokens[path[0]] != tree.main_path[0] and len(path) == 2]
    assert off, "nothing follows a token beside the trunk"
    head = speculator._predictor._head  # type: ignore[attr-defined]
    first = head.predict_next(rows, [tokens[-1]], 0)
    for path in off:
        beside, then = (tree.tokens[node] for node in path)
        logits = head.predict_next(first.hidden, [beside], 1).logits[0]
        assert then in logits.topk(4).indices.tolist()


def test_what_is_too_unlikely_is_not_offered(medusa: StateReading) -> None:
    full = drafted(medusa, TOKENS, 0, MEDUSA["features"], a_request(TOKENS, 12, Shape.TREE)).tree
    cut = drafted(medusa, TOKENS, 0, MEDUSA["features"], a_request(TOKENS, 12, Shape.TREE, least=0.05)).tree
    assert 0 < len(cut) < len(full)
    assert cut == full.first(len(cut))


def test_sampled_tokens_are_foreseen_with_the_target_s_noise(medusa: StateReading) -> None:
    """Tokens win by the draft's log probability plus some of the noise of their position, over seeds."""
    logits = MEDUSA["medusa_logits_last"].log_softmax(dim=-1).double()
    found = set()
    for seed in range(20):
        changes = {"sampling": Sampling(), "seed": seed}
        tokens = drafted(medusa, TOKENS, 0, MEDUSA["features"], a_request(TOKENS), **changes).tokens
        for place, token in enumerate(tokens):
            noise = gumbel(key(seed, 0, len(TOKENS) + place, Purpose.DRAW), torch.arange(96))
            scores = 0.95 * logits[place] + 0.8 * noise
            assert scores[token] == scores[logits[place].topk(64).indices].max()
        found.add(tokens)
    assert len(found) > 10


def test_under_ratio_tokens_are_drawn_from_what_is_sent(medusa: StateReading) -> None:
    proposal = drafted(medusa, TOKENS, 0, MEDUSA["features"], a_request(TOKENS, 3, Shape.TREE, least=0.9), **REJECTION)
    assert proposal.tree.is_chain
    probs = proposal.tree.probs
    assert probs is not None
    assert len(proposal.tokens) == 3, "a block's length depends on nothing that was drawn"
    prefix = Prefix(KEY, TOKENS)
    for place, token in enumerate(proposal.tokens):
        ids = torch.tensor(probs.token_ids[place])
        weights = torch.tensor(probs.weights[place])
        logits = MEDUSA["medusa_logits_last"][place]
        assert ids.tolist() == logits.topk(TOP_K).indices.tolist()
        torch.testing.assert_close(weights / 60_000, (logits[ids] - logits.max()).exp(), rtol=0.0, atol=1e-4)
        drawn = gumbel_argmax(weights.double().log(), key(7, 0, prefix.hash, Purpose.DRAFT))
        assert token == ids[drawn]
        prefix.extend((token,))


def test_sessions_of_one_pass_get_what_each_gets_alone(medusa: StateReading, speculator: StateReading) -> None:
    for method, rows in ((medusa, MEDUSA["features"]), (speculator, MEDUSA["features"])):
        kinds = {"greedy": {}, "drawn": {"sampling": Sampling()}, "rejection": REJECTION}
        kinds["penalised"] = {"sampling": Sampling(presence_penalty=0.5)}
        requests = [a_request(TOKENS, 4, Shape.TREE, session=name) for name in kinds]
        alone = []
        for name, changes in kinds.items():
            method.open(an_open(name, tokens=TOKENS, **changes))
            method.states(name, 0, rows)
            alone += method.draft([request for request in requests if request.session == name])
        assert method.draft(requests) == alone
        assert all(proposal.tokens for proposal in alone)
        method.close(list(kinds))
