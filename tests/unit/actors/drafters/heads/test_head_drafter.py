"""Tests heads that predict several tokens from the target's states: published drafts, trees and lookahead blocks.

`test_methods.py` covers behavior common to all methods.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from actors.drafters.heads.dflash.drafting import DFlashContext
from actors.drafters.heads.last_state import LastRows
from actors.drafters.heads.mlp_speculator import MlpSpeculator, load_mlp_speculator
from actors.drafters.registry import states_needed
from actors.sampling.gumbel import Purpose, gumbel, key
from cluster.drafting.requests import Proposal
from protos.draft_tree import NO_TREE, DraftTree
from protos.messages import Sampling, Shape
from protos.prefix import Prefix
from tests.unit.actors.drafters.drafting import ALL_TOKENS, a_draft, decided, drafted, head_method, never, wanted_block
from tests.unit.actors.drafters.heads.eagle_fixtures import CPU, TARGET, altered, case, checkpoint
from tests.unit.cluster.samples import KEY

MEDUSA = case("medusa")
DFLASH = case("dflash")
SPECULATOR = case("mlp_speculator")
TOKENS = decided(MEDUSA)
LATER = (*DFLASH["step2_ids"].tolist(), int(DFLASH["step2_anchor"]))  # text of a second round
WIDTHS = {"medusa": 5, "dflash": 4, "mlp_speculator": 3}
AHEAD = 3  # tokens per lookahead block


def rows_of(known: dict[str, Tensor]) -> Tensor:
    """Returns the states of all tokens except the last, (positions, width); the speculator's fixture has only one."""
    found = known["features"]
    return found if found.dim() > 1 else found.expand(len(TOKENS) - 1, -1)


def chain_of(known: dict[str, Tensor]) -> tuple[int, ...]:
    """Returns the tokens that the reference drafts."""
    return tuple(
        next(known[name] for name in ("medusa_top1", "chain_tokens", "draft_tokens") if name in known).tolist()
    )


class Opened:
    """Drafting method with the fixture's session and its states."""

    def __init__(self, name: str, folder: Path | None = None, **changes: Any) -> None:
        self.name = name
        self.known = case(name)
        self.want = wanted_block(decided(self.known), 16, **changes)
        self.method = head_method(name, folder or checkpoint(name))
        self.method.open(replace(self.want.open, tokens=self.want.tokens))
        self.method.states("s", 0, rows_of(self.known))

    def draft(self, **changes: Any) -> Proposal:
        (found,) = self.method.draft([replace(self.want, **changes).request])
        return found

    def ahead(self, tree: DraftTree | Sequence[int], most: int = AHEAD, **changes: Any) -> list[Proposal]:
        found: list[Proposal] = self.method.draft_ahead(
            [self.want.under(tree, max_tokens=most, **changes).ahead], never
        )
        return found


at_once = pytest.mark.parametrize("name", ["medusa", "dflash"])
every = pytest.mark.parametrize("name", WIDTHS)


# ---------------------------------------------------------------- blocks


@pytest.mark.parametrize("name", [*WIDTHS, "dflash_speculators"])
def test_a_block_equals_the_reference(name: str) -> None:
    known = case(name)
    method = head_method(name.partition("_speculators")[0], checkpoint(name))
    want = wanted_block(decided(known), 16)
    assert drafted(method, want, rows_of(known)).tree == DraftTree.chain(chain_of(known))
    assert drafted(method, replace(want, max_tokens=2), rows_of(known)).tokens == chain_of(known)[:2]
    assert method.tokens_per_forward == len(chain_of(known))


def test_a_last_state_alone_suffices() -> None:
    method = head_method("mlp_speculator", checkpoint("mlp_speculator"))
    block = drafted(method, wanted_block(TOKENS, 16), SPECULATOR["features"].unsqueeze(0), at=len(TOKENS) - 2)
    assert block.tokens == chain_of(SPECULATOR)


def test_states_arrive_before_their_verdict_or_after() -> None:
    rows = MEDUSA["features"]
    method = head_method("medusa", checkpoint("medusa"))
    want = wanted_block(TOKENS[:4], 16)
    method.open(replace(want.open, tokens=want.tokens))
    method.states("s", 8, rows[8:])
    method.states("s", 0, rows[:9])
    for tokens, states in ((TOKENS[4:9], rows[:9]), (TOKENS[9:], rows[:0]), ((1,), rows[:0])):
        method.committed("s", tokens)
        want = want.after(*tokens)
        method.states("s", 0, states)
        (block,) = method.draft([want.request])
        last = len(want.tokens) - 2
        known = MEDUSA["medusa_logits_all"][:, last : last + 1].argmax(dim=-1).flatten().tolist()
        assert block.tokens == tuple(known), "nothing where its state has not arrived"


def test_a_second_round_goes_on_from_the_first() -> None:
    """The state of the block's first place arrived before the token after the anchor was known."""
    dflash = Opened("dflash")
    dflash.method.states("s", 12, DFLASH["step2_features"][:1])
    assert dflash.draft().tokens == chain_of(DFLASH)
    dflash.method.committed("s", LATER[len(TOKENS) :])
    dflash.method.states("s", 13, DFLASH["step2_features"][1:])
    (block,) = dflash.method.draft([wanted_block(LATER, 16).request])
    assert block.tokens == tuple(DFLASH["step2_draft_tokens"].tolist())


def test_windows_see_the_same_keys_as_in_a_single_forward(tmp_path: Path) -> None:
    """The test runs until the text exceeds a window."""
    config = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4}
    folder = altered(tmp_path, "dflash", **config)
    assert states_needed(a_draft("dflash", folder), TARGET).sees is None, (
        "a layer without a window sees all of the text"
    )
    method = head_method("dflash", folder)
    want = wanted_block(TOKENS[:3], 16)
    method.open(replace(want.open, tokens=want.tokens))
    method.states("s", 0, DFLASH["features"])
    for length in range(3, len(TOKENS) + 1):
        (block,) = method.draft([want.request])
        method.committed("s", TOKENS[length : length + 1])
        want = want.after(*TOKENS[length : length + 1])
    method.close(["s"])
    assert block == drafted(method, want, DFLASH["features"])


def test_pieces_after_a_gap_are_bounded() -> None:
    context = DFlashContext()
    for position in range(1, 10_000):
        context.put(position, torch.zeros(1, 2))
    context.put(0, torch.zeros(1, 2))
    assert context.has(4)
    assert not context.has(9_000)


def test_only_rows_from_the_last_token_on_are_kept_and_their_number_is_bounded() -> None:
    rows = LastRows(CPU, torch.float32)
    rows.keep("s", 10, torch.arange(20_000.0).unsqueeze(1), first_needed=12)
    assert rows.at("s", 11) is None
    kept = rows.at("s", 12)
    assert kept is not None
    assert kept.tolist() == [2.0]
    assert kept.untyped_storage().nbytes() == 4, "a row must not hold on to all that it came with"
    end = next(position for position in count(12) if rows.at("s", position) is None)
    assert 100 < end < 10_000
    rows.forget_before("s", 20)
    assert rows.at("s", 19) is None
    assert rows.at("s", 20) is not None


# ---------------------------------------------------------------- trees


@at_once
def test_a_tree_has_the_likeliest_tokens_of_each_position(name: str) -> None:
    """Acceptance probabilities are calibrated, close to the head's own."""
    opened = Opened(name)
    tree = opened.draft(max_tokens=12, shape=Shape.TREE).tree
    assert len(tree) == 12
    assert tree.depth <= WIDTHS[name]
    probs = opened.known["medusa_logits_last" if name == "medusa" else "logits"].softmax(dim=-1)
    for node, depth in enumerate(tree.depths):
        assert tree.tokens[node] in probs[depth].topk(4).indices.tolist()
    products = [float(probs[range(len(path)), [tree.tokens[node] for node in path]].prod()) for path in tree.paths]
    if name == "medusa":
        assert products == pytest.approx(sorted(every_product(probs), reverse=True)[:12], rel=0.5)
    cut = opened.draft(max_tokens=12, shape=Shape.TREE, least_chance=0.05).tree
    assert 0 < len(cut) < len(tree)
    assert cut == tree.first(len(cut))


def every_product(probs: Tensor) -> list[float]:
    """Returns the probability of every path through the four likeliest tokens of the first positions."""
    level = [1.0]
    found: list[float] = []
    for row in probs[:5]:
        level = [chance * each for chance in level for each in row.topk(4).values.tolist()]
        found += level
    return found


def speculator_of(folder: Path) -> MlpSpeculator:
    return load_mlp_speculator(folder, TARGET, torch.float32, CPU, ALL_TOKENS)


def test_trees_of_a_recurrent_head_go_on_from_tokens_beside_the_main_path() -> None:
    opened = Opened("mlp_speculator")
    tree = opened.draft(max_tokens=12, shape=Shape.TREE).tree
    assert tree.main_path[0] == SPECULATOR["chain_tokens"][0]
    assert tree.depth <= 3
    off = [path for path in tree.paths if tree.tokens[path[0]] != tree.main_path[0] and len(path) == 2]
    assert off, "nothing follows a token beside the main path"
    head = speculator_of(checkpoint("mlp_speculator"))
    output = head.predict_next(SPECULATOR["features"].unsqueeze(0), [TOKENS[-1]], 0)
    for path in off:
        beside, then = (tree.tokens[node] for node in path)
        logits = head.predict_next(output.hidden, [beside], 1).logits[0]
        assert then in logits.topk(4).indices.tolist()


def test_sampled_tokens_are_foreseen_with_the_target_s_noise() -> None:
    """No other token has both a higher log probability and more noise.

    The drafted tokens match the target far more often than the head's top token does.
    """
    logits = MEDUSA["medusa_logits_last"].log_softmax(dim=-1).double()
    found = set()
    right = {"drafted": 0, "likeliest": 0}
    for seed in range(20):
        tokens = Opened("medusa", sampling=Sampling(), seed=seed).draft().tokens
        for place, token in enumerate(tokens):
            noise = gumbel(key(seed, 0, len(TOKENS) + place, Purpose.DRAW), torch.arange(96))
            better = (logits[place] > logits[place, token]) & (noise > noise[token])
            assert not better.any()
            target = int((logits[place] + noise).argmax())
            right["drafted"] += token == target
            right["likeliest"] += int(logits[place].argmax()) == target
        found.add(tokens)
    assert len(found) > 10
    assert right["drafted"] > 1.5 * right["likeliest"]


# ---------------------------------------------------------------- drafting ahead of verdicts


@at_once
def test_continuations_of_each_outcome_use_the_remaining_occurrences(name: str) -> None:
    """A head's later positions do not depend on the verdict's tokens; beyond the last, the head waits for states."""
    places = Opened(name).draft().tokens
    for verified in range(WIDTHS[name] + 1):
        found = Opened(name).ahead(places[:verified])
        for guess in found:
            done = len(guess.outcome)
            assert done < WIDTHS[name]
            assert guess.outcome[:-1] == places[: done - 1]
            assert guess.tokens == places[done : done + AHEAD]
            assert guess.base_len == len(TOKENS) + done
            assert guess.prefix_hash == Prefix(KEY, (*TOKENS, *guess.outcome)).hash
        outcomes = {guess.outcome for guess in found}
        assert (places[: verified + 1] in outcomes) == (verified + 1 < WIDTHS[name]), "all of it is accepted, and one"
        assert any(len(outcome) <= verified for outcome in outcomes) == (verified > 0), "rejections"


def going_on(head: MlpSpeculator, tokens: tuple[int, ...], length: int) -> tuple[int, ...]:
    """Returns the recurrent head's greedy chain after tokens that follow the text, from the target's only state."""
    state = rows_of(SPECULATOR)[-1:]
    for depth, token in enumerate((TOKENS[-1], *tokens)):
        output = head.predict_next(state, [token], depth)
        state = output.hidden
    found = [int(output.logits.argmax())]
    while len(found) < length:
        output = head.predict_next(state, [found[-1]], len(tokens) + len(found))
        state = output.hidden
        found.append(int(output.logits.argmax()))
    return tuple(found)


def sharper(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: (6 if "head" in name else 1) * tensor for name, tensor in tensors.items()}


def test_a_recurrent_head_continues_from_its_state_and_the_committed_token(tmp_path: Path) -> None:
    """The head is more confident than the fixture's, so several further tokens are likely."""
    folder = altered(tmp_path, "mlp_speculator", sharper)
    head = speculator_of(folder)
    block = going_on(head, (), 3)
    for verified in range(4):
        found = Opened("mlp_speculator", folder).ahead(block[:verified])
        for guess in found:
            assert guess.tokens == going_on(head, guess.outcome, len(guess.tokens))
        expected = (*block[:verified], going_on(head, block[:verified], 1)[0])
        assert expected in {guess.outcome for guess in found}, "all of it, and what its own state predicts then"
        assert max(len(guess.tokens) for guess in found) == AHEAD


def test_a_recurrent_head_repeats_its_last_step_beyond_it() -> None:
    head = speculator_of(checkpoint("mlp_speculator"))
    state = torch.randn(2, head.config.inner, generator=torch.Generator().manual_seed(1))
    one, other = (head.predict_next(state, [3, 5], depth) for depth in (2, 7))
    assert torch.equal(one.logits, other.logits)
    assert head.config.reach(7) == 3


@every
def test_tokens_beside_the_main_path_are_followed_too(name: str) -> None:
    opened = Opened(name)
    block = opened.draft(max_tokens=8, shape=Shape.TREE)
    beside = set(block.tree.off_main_path[:4])
    assert beside
    found = [guess for guess in opened.ahead(block.tree, chances=block.chances) if guess.outcome[:-1] in beside]
    assert found
    for guess in found:
        if name == "mlp_speculator":
            head = speculator_of(checkpoint(name))
            assert guess.tokens == going_on(head, guess.outcome, len(guess.tokens))
        else:
            assert guess.tokens == chain_of(case(name))[len(guess.outcome) :][:AHEAD]


@every
def test_blocks_ahead_are_trees_where_trees_are_taken(name: str) -> None:
    found = Opened(name).ahead(NO_TREE, 8, shape=Shape.TREE)
    assert any(not guess.tree.is_chain for guess in found)
    chains = {guess.outcome: guess.tokens for guess in Opened(name).ahead(NO_TREE, 8)}
    assert all(guess.tree.main_path[0] == chains[guess.outcome][0] for guess in found)
