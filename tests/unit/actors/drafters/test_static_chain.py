"""Blocks drafted by captured chains equal those of one forward per token, which chooses tokens on the host."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.attention import PaddedBackend
from actors.attention.padded import PaddedSdpa
from actors.attention.varlen import Varlen
from actors.compute.capture import Capture
from actors.drafters.model.draft_cache import DraftCache
from actors.drafters.model.draft_model import DraftModel, DraftWeights
from actors.drafters.model.sampling import Calibration, DraftingLimits
from actors.engine.runner import ModelRunner
from actors.engine.static_step import Buckets, Recording
from cluster.drafting.requests import Proposal
from protos.messages import Acceptance, Sampling, Shape, TokenRules
from tests.unit.actors.attention.attention_kernels import varlen
from tests.unit.actors.attention.triton_interpreter import interpreted_paged
from tests.unit.actors.captures import CountedCapture, Overwriting, StaticCapture
from tests.unit.actors.drafters.drafting import PAGE_SIZE, WantedBlock, propose, wanted_block
from tests.unit.actors.tiny_models import MODELS, VOCABULARY, twins
from tests.unit.cluster.samples import GREEDY

SESSIONS = 5
CONTEXT = 96
PAGES = 160
BUCKETS = Buckets((1, 4, 16, 24), rows=16, pages=CONTEXT // PAGE_SIZE)
LONG = 12  # tokens of blocks that need more than one chain
WARM = Sampling(temperature=0.6)


def without_chains(runner: ModelRunner) -> Any:
    """Offers only a runner's forwards."""
    return SimpleNamespace(vocabulary=runner.vocabulary, forward=runner.forward)


@torch.inference_mode()
def a_runner(model: Any, backend: PaddedBackend | None = None, capture: Capture | None = None) -> ModelRunner:
    """Returns a runner whose whole cache is NaN, except the page of zeros; without `capture`, its steps are exact."""
    recording = None if capture is None else Recording(BUCKETS, capture)
    runner = ModelRunner(model, PAGES, PAGE_SIZE, backend, recording=recording)
    for layer in range(int(model.config.num_hidden_layers)):
        pool = runner.cache.layer(layer)
        pool[: runner.cache.padding_slot] = torch.nan
        pool[runner.cache.scrap_slot :] = torch.nan
    return runner


def a_draft(runner: Any, pages: int = PAGES, calibration: Calibration | None = None, **limits: Any) -> DraftModel:
    return DraftModel(
        runner,
        torch.arange(VOCABULARY),
        DraftCache(pages, PAGE_SIZE),
        DraftingLimits(**{"top_k": 4} | limits),
        lambda: 0.0,
        calibration=calibration,
    )


class Twins:
    """Draft models of equal weights: one chooses tokens in chains, and one on the host after each forward."""

    def __init__(self, capture: Capture, name: str = "llama", backend: PaddedBackend | None = None) -> None:
        model, twin = twins(MODELS[name], seed=3)
        self._chained = a_runner(model, backend or PaddedSdpa(), capture)
        self._stepped = without_chains(a_runner(twin, backend or PaddedSdpa(), Overwriting()))
        self.restart()

    def restart(self, **options: Any) -> None:
        """Creates new draft models on the same runners."""
        self.chained = a_draft(self._chained, **options)
        self.stepped = a_draft(self._stepped, **options)

    def exchange(self) -> None:
        """Exchanges the weights of the model with chains for equal ones."""
        self.chained.exchange(DraftWeights(self._chained, torch.arange(VOCABULARY)))

    def propose(self, wants: Sequence[WantedBlock]) -> list[Proposal]:
        """Asserts that both models propose the same blocks with the same probabilities; returns them."""
        found = propose(self.chained, wants)
        check_equal(found, propose(self.stepped, wants))
        return found

    def decide(self, rng: Random, want: WantedBlock, block: Proposal) -> WantedBlock:
        """Returns the session after a verdict that accepts some of the block, from which both models learn."""
        decided = after(rng, want, block)
        for draft in (self.chained, self.stepped):
            draft.committed(want.open.session, decided.tokens[len(want.tokens) :])
        return decided

    def close(self, sessions: Sequence[str]) -> None:
        for draft in (self.chained, self.stepped):
            draft.close(sessions)
            assert draft.is_idle


def check_equal(found: Sequence[Proposal], expected: Sequence[Proposal], rel: float = 1e-5) -> None:
    assert list(found) == list(expected)
    for one, other in zip(found, expected, strict=True):
        assert one.chances == pytest.approx(other.chances, rel=rel)
        assert (one.confidence or 0.0) == pytest.approx(other.confidence or 0.0, rel=rel)
        assert one.chance == pytest.approx(other.chance, rel=rel)


def a_want(rng: Random, name: str, **changes: Any) -> WantedBlock:
    tokens = [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 30))]
    sampling = rng.choice([GREEDY, WARM, Sampling(temperature=1.0), Sampling(temperature=1.7)])
    options = {"sampling": sampling, "seed": rng.getrandbits(60), "draft_tokens": LONG, "max_len": CONTEXT}
    return wanted_block(tokens, 1, name, **options | changes)


def after(rng: Random, want: WantedBlock, block: Proposal) -> WantedBlock:
    """Returns the session after a verdict that accepts some of the block."""
    main_path = block.tree.main_path
    accepted = main_path[: rng.randint(0, len(main_path))]
    return want.after(*accepted, rng.randrange(VOCABULARY))


@pytest.fixture(scope="module")
def pair() -> Twins:
    return Twins(Overwriting())


@settings(max_examples=30, deadline=None, derandomize=True)  # rounding may decide near-ties
@given(seed=st.integers(0, 2**32))
def test_chains_draft_the_blocks_of_separate_forwards(pair, seed):
    """Sessions of any length and temperature; blocks of any length, cut by confidence, positions and full passes."""
    rng = Random(seed)
    pair.restart(
        min_confidence=rng.choice([0.0, 0.0, 0.05, 0.3]),
        max_positions=rng.choice([None, 20]),
        pass_tokens=rng.choice([2048, 3]),
    )
    wants = {name: a_want(rng, name) for name in "abcde"[: rng.randint(1, SESSIONS)]}
    for _ in range(5):
        names = rng.sample(sorted(wants), rng.randint(1, len(wants)))
        longest = rng.choice([3, 5, LONG])
        least = rng.choice([0.0, 0.02])
        asked = [replace(wants[name], max_tokens=rng.randint(1, longest), least_chance=least) for name in names]
        passes = [asked] if rng.random() < 0.5 else [[want] for want in asked]
        blocks = [block for wants_of_pass in passes for block in pair.propose(wants_of_pass)]
        if rng.random() < 0.5:  # lookahead continues from the caches that the blocks have left
            pair.propose([want.under(block.tree, max_tokens=3) for want, block in zip(asked, blocks, strict=True)])
        wants |= {name: pair.decide(rng, want, block) for name, want, block in zip(names, asked, blocks, strict=True)}
    pair.close(sorted(wants))


class Constant(Calibration):
    """Keeps its weights."""

    def committed(self, session: str, tokens: Sequence[int]) -> None:
        pass


def chances_of(block: Proposal) -> dict[tuple[int, ...], float]:
    """Returns the probability of each node, by its path."""
    paths = [tuple(block.tree.tokens[node] for node in path) for path in block.tree.paths]
    return dict(zip(paths, block.chances, strict=True))


@settings(max_examples=30, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32))
def test_chains_draft_the_trees_of_separate_forwards(pair, seed):
    """Side branches begin when the main path is known, so trees may differ in branches that are hardly worth a pass."""
    rng = Random(seed)
    pair.restart(calibration=Constant())  # the models would learn from different side branches
    wants = {name: replace(a_want(rng, name), shape=Shape.TREE) for name in "abcde"[: rng.randint(1, SESSIONS)]}
    for _ in range(3):
        least = rng.choice([0.0, 0.02])
        wants = {
            name: replace(want, max_tokens=rng.randint(1, LONG), least_chance=least) for name, want in wants.items()
        }
        found, expected = (propose(draft, list(wants.values())) for draft in (pair.chained, pair.stepped))
        for one, other in zip(found, expected, strict=True):
            both = min(len(one.tree.main_path), len(other.tree.main_path))
            assert one.tree.main_path[:both] == other.tree.main_path[:both]
            chances, others = chances_of(one), chances_of(other)
            common = chances.keys() & others.keys()
            assert [chances[path] for path in common] == pytest.approx([others[path] for path in common], rel=1e-5)
            assert sum(chances.values()) > 0.95 * sum(others.values())
        wants = {name: pair.decide(rng, wants[name], block) for name, block in zip(wants, found, strict=True)}
    pair.close(sorted(wants))


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "mistral"])
def test_chains_of_other_models(name):
    rng = Random(1)
    pair = Twins(Overwriting(), name)
    for round_ in range(3):
        pair.propose([replace(a_want(rng, f"{round_} {name}"), max_tokens=6) for name in "abc"])


def test_chains_equal_exact_steps():
    """These steps are not padded, so probabilities differ by rounding."""
    model, twin = twins(MODELS["llama"], seed=3)
    chained = a_draft(a_runner(model, PaddedSdpa(), Overwriting()))
    exact = a_draft(a_runner(twin))
    rng = Random(2)
    for sessions in ("a", "bcd", "efghi"):
        wants = [replace(a_want(rng, name), max_tokens=5) for name in sessions]
        check_equal(propose(chained, wants), propose(exact, wants), rel=1e-3)


@pytest.mark.parametrize("backend", [interpreted_paged, lambda: Varlen(varlen)], ids=["paged", "varlen"])
def test_every_kernel_that_can_be_captured_serves_chains(backend):
    pair = Twins(Overwriting(), backend=backend())
    rng = Random(7)
    pair.propose([replace(a_want(rng, name), max_tokens=4) for name in "abc"])


def test_no_operation_of_a_chain_depends_on_values():
    pair = Twins(StaticCapture())
    rng = Random(4)
    for sessions, tokens in (("a", 1), ("bcd", 5), ("efghi", 3), ("b", LONG)):
        pair.propose([replace(a_want(rng, name), max_tokens=tokens) for name in sessions])
    propose(pair.chained, [replace(a_want(rng, name), max_tokens=6, shape=Shape.TREE) for name in "abc"])


# ---------------------------------------------------------------- forwards


@pytest.mark.parametrize(("tokens", "repeats"), [(1, 2), (5, 2), (8, 2), (9, 4)], ids=lambda number: str(number))
def test_a_block_is_one_captured_step_and_one_chain(tokens, repeats):
    """The step reads the tokens of the verdict. A chain has up to eight tokens."""
    counted = CountedCapture()
    pair = Twins(counted)
    wants = [wanted_block((1, 2, 3), tokens, name, draft_tokens=tokens, max_len=CONTEXT) for name in "abc"]
    assert [len(block.tokens) for block in pair.propose(wants)] == [tokens] * 3
    assert counted.repeats == repeats
    captures = counted.captures
    pair.propose([want.after(4, 5) for want in wants])
    assert (counted.captures, counted.repeats) == (captures, 2 * repeats), "equal shapes are captured once"


def test_a_tree_takes_a_step_and_a_chain_more():
    """The second step reads the first tokens of all side branches."""
    counted = CountedCapture()
    draft = Twins(counted).chained
    wants = [
        wanted_block((at, 2, 3), 8, f"session {at}", draft_tokens=8, max_len=CONTEXT, shape=Shape.TREE)
        for at in range(5)
    ]
    blocks = propose(draft, wants)
    assert any(path[:-1] != block.tree.main_path[: len(path) - 1] for block in blocks for path in chances_of(block))
    assert counted.repeats == 4


def test_all_chains_can_be_captured_before_any_block():
    """Captures for the given sessions and tokens only, and leaves the cache as it is."""
    counted = CountedCapture()
    pair = Twins(counted)
    rng = Random(3)
    wants = [replace(a_want(rng, name), max_tokens=3) for name in "abc"]
    blocks = pair.propose(wants)
    pair.chained.capture_chains(5, 4)
    captures = counted.captures
    later = [after(rng, want, block) for want, block in zip(wants, blocks, strict=True)]
    for tokens in range(1, 6):
        for count in (1, 3):
            pair.propose([replace(want, max_tokens=tokens) for want in later[:count]])
    steps = counted.captures - captures
    assert steps <= 3, "only the steps that read the verdicts, and the largest step, may be new"


def test_blocks_grow_token_by_token_if_chains_cannot_be_captured(caplog):
    capture = CountedCapture()
    pair = Twins(capture)
    capture.limit = 0
    pair.chained.capture_chains(5, 4)
    assert "out of memory" in caplog.text
    capture.limit = None
    pair.propose([wanted_block((1, 2, 3), 5, draft_tokens=5, max_len=CONTEXT)])
    assert capture.repeats == 5
    pair.close("s")
    pair.exchange()
    pair.propose([wanted_block((1, 2, 3), 5, draft_tokens=5, max_len=CONTEXT)])
    assert capture.repeats == 10, "an exchange of weights does not try again"


def test_a_chain_that_cannot_be_captured_when_it_occurs_grows_token_by_token(caplog):
    pair = Twins(CountedCapture(limit=1))
    pair.propose([wanted_block((1, 2, 3), 5, draft_tokens=5, max_len=CONTEXT)])
    assert "out of memory" in caplog.text


def test_blocks_without_pages_for_a_chain_grow_token_by_token():
    """Two of three pages hold the prompts; the first session to grow takes the last one."""
    counted = CountedCapture()
    pair = Twins(counted)
    pair.restart(pages=3)
    wants = [wanted_block((1, 2, 3, 4), 8, name, draft_tokens=8, max_len=CONTEXT) for name in "ab"]
    assert [len(block.tokens) for block in pair.propose(wants)] == [5, 1]
    assert counted.repeats == 5
    pair.close("ab")


def test_pages_reserved_for_a_chain_that_does_not_start_are_free_again(pair):
    """The third page suffices for the chain of one session; but its block ends, and the other one needs the page."""
    wants = [wanted_block((at, 2, 3, 4), 5, name, draft_tokens=5, max_len=CONTEXT) for at, name in enumerate("abc")]
    pair.restart()
    confidence = {block.session: block.confidence or 0.0 for block in pair.propose(wants)}
    unsure, _, sure = sorted(wants, key=lambda want: confidence[want.open.session])
    least = (confidence[unsure.open.session] + confidence[sure.open.session]) / 2
    pair.restart(pages=3, min_confidence=least)
    assert [len(block.tokens) > 1 for block in pair.propose([unsure, sure])] == [False, True]


def with_rules(want: WantedBlock, rng: Random) -> WantedBlock:
    rules = TokenRules(logit_bias=((rng.randrange(VOCABULARY), 2.0),))
    return replace(want, open=replace(want.open, rules=rules))


OTHERS: dict[str, Callable[[WantedBlock, Random], WantedBlock]] = {
    "top-k": lambda want, _: replace(want, open=replace(want.open, sampling=replace(WARM, top_k=5))),
    "top-p": lambda want, _: replace(want, open=replace(want.open, sampling=replace(WARM, top_p=0.8))),
    "min-p": lambda want, _: replace(want, open=replace(want.open, sampling=replace(WARM, min_p=0.1))),
    "rules": with_rules,
    "rejection": lambda want, _: replace(want, open=replace(want.open, sampling=WARM, acceptance=Acceptance.REJECTION)),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_blocks_that_need_the_host_are_drafted_by_separate_forwards(kind):
    """So are all other blocks of the same pass, since a forward serves all of them."""
    counted = CountedCapture()
    pair = Twins(counted)
    rng = Random(5)
    plain, other = (replace(a_want(rng, name), max_tokens=4) for name in "ab")
    pair.propose([plain, OTHERS[kind](other, rng)])
    assert counted.repeats == 4, "one per token"
    pair.propose([replace(plain, max_tokens=4)])
    assert counted.repeats == 6


# ---------------------------------------------------------------- values


def test_a_block_ends_before_non_finite_logits_and_others_go_on(pair):
    """The token that the model draws after some text has a NaN embedding, so logits after it are NaN."""
    wants = [
        wanted_block(tokens, 6, name, draft_tokens=6, max_len=CONTEXT)
        for name, tokens in (("a", (1, 2)), ("b", (3, 4)), ("c", (9,)))
    ]
    model, twin = twins(MODELS["llama"], seed=3)
    whole = propose(a_draft(a_runner(twin)), wants)
    fatal = whole[0].tokens[2]
    lengths = [block.tokens.index(fatal) + 1 if fatal in block.tokens[:-1] else len(block.tokens) for block in whole]
    assert min(lengths) < 6 == max(lengths), "some block has the token, and some has not"
    with torch.no_grad():
        model.get_input_embeddings().weight[fatal] = torch.nan
    found = propose(a_draft(a_runner(model, PaddedSdpa(), Overwriting())), wants)
    assert [block.tokens for block in found] == [
        block.tokens[:length] for block, length in zip(whole, lengths, strict=True)
    ]


class Undecided(Calibration):
    """Rounds the probabilities of all candidates to the same number."""

    def chances(self, kind: Any, candidates: Any) -> Any:
        return np.full(len(candidates.ids) + 1, 0.5)


def test_blocks_consist_of_the_tokens_that_the_device_has_fed(pair):
    """Host and device may round probabilities differently; then the order of equals is that of the device."""
    hot = Sampling(temperature=1.7)
    wants = [wanted_block((5, 6), 6, name, draft_tokens=6, max_len=CONTEXT, sampling=hot) for name in "ab"]
    pair.restart()
    expected = pair.propose(wants)
    pair.restart(calibration=Undecided())
    found = propose(pair.chained, wants)
    assert [block.tokens for block in found] == [block.tokens for block in expected]
    pair.restart(calibration=Undecided())
    others = propose(pair.stepped, wants)
    assert [block.tokens for block in others] != [block.tokens for block in expected], "not always the likeliest token"
