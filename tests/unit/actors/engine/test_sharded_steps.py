"""Tensor-parallel ranks decide what one rank decides, and gather logits only in steps that read them.

Ranks are threads; followers receive the leader's encoded forwards through queues.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar

import pytest
import torch
from llguidance import LLMatcher
from torch import Tensor

from actors.attention.padded import PaddedSdpa
from actors.compute.collectives import Group, SingleRank
from actors.engine.executor import StepExecutor
from actors.engine.forward_codec import decode_forward
from actors.engine.runner import ModelRunner, Runner
from actors.engine.static_step import Buckets, Recording
from actors.engine.tensor_parallel import LeadingRunner
from actors.grammars import GrammarCompiler
from actors.models.checkpoint import load
from actors.models.decoder import ForwardOutput
from actors.sampling.draws import Draws
from cluster.errors import ModelError
from cluster.verification.step import Outcome, Row, StepPlan
from protos.draft_tree import NO_TREE, DraftTree
from protos.messages import Acceptance, Open, Sampling, Scoring, TokenRules
from tests.unit.actors.engine.test_static_step import CountedCapture
from tests.unit.actors.grammars.languages import small_vocabulary
from tests.unit.actors.groups import at_once, threads
from tests.unit.actors.models.test_sharding import a_model
from tests.unit.cluster.samples import an_open

T = TypeVar("T")
CPU = torch.device("cpu")
COLUMNS = 32  # of the LM head
WIDTH = 11  # columns of the first of three ranks
VOCABULARY = 29  # the last ids are padding
PAGE_SIZE = 4
PAGES_EACH = 8
NEW_TOKENS = 12
OPENS = (
    an_open("greedy", tokens=(1, 2, 3)),
    an_open("sampled", tokens=(9, 4, 7), sampling=Sampling(), seed=3),
    an_open("cool", tokens=(5, 2, 8, 1), sampling=Sampling(temperature=0.6), seed=8),
    an_open("also greedy", tokens=(28, 0), acceptance=Acceptance.REJECTION),
)
PAGES = PAGES_EACH * (len(OPENS) + 1)
BUCKETS = Buckets((1, 2, 4, 8, 16, 32), rows=len(OPENS) + 1, pages=PAGES_EACH)


class RecordingGroup:
    """Rank of a group that records each tensor to gather."""

    def __init__(self, group: Group) -> None:
        self.rank = group.rank
        self.size = group.size
        self._group = group
        self.gathered: list[Tensor] = []

    def all_reduce(self, tensor: Tensor) -> None:
        self._group.all_reduce(tensor)

    def all_gather(self, tensor: Tensor) -> Tensor:
        self.gathered.append(tensor)
        return self._group.all_gather(tensor)


class Link:
    """Sends messages to followers in other threads."""

    def __init__(self, followers: int) -> None:
        self.queues: list[SimpleQueue[bytes]] = [SimpleQueue() for _ in range(followers)]

    def send(self, message: bytes) -> None:
        for queue in self.queues:
            queue.put(message)


class FromLogits:
    """Runner that always returns logits and no tokens, so that the executor draws from logits."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.vocabulary = runner.vocabulary

    def forward(self, *arguments: Any, draws: Draws, **options: Any) -> ForwardOutput:
        output = self._runner.forward(*arguments, draws=replace(draws, needs_logits=True), **options)
        return output._replace(drawn=None)

    def read_states(self, slots: Sequence[int]) -> bytes:
        return self._runner.read_states(slots)


def a_runner(folder: Path, group: Group, **options: Any) -> ModelRunner:
    model = load(folder, "float32", CPU, group).model
    return ModelRunner(model, PAGES, PAGE_SIZE, vocabulary=VOCABULARY, ranks=group.size, **options)


def an_executor(runner: Runner) -> StepExecutor:
    return StepExecutor(runner, VOCABULARY, grammars=GrammarCompiler(small_vocabulary()))


class Ranks:
    """All ranks of a target."""

    def __init__(self, folder: Path, size: int, captures: bool = False) -> None:
        self.groups = [RecordingGroup(group) for group in threads(size)]
        self.captures = [CountedCapture() for _ in self.groups]
        self._runners = []
        for group, capture in zip(self.groups, self.captures, strict=True):
            static = {"attention": PaddedSdpa(), "recording": Recording(BUCKETS, capture)} if captures else {}
            self._runners.append(a_runner(folder, group, **static))

    def capture(self) -> None:
        at_once([runner.capture_steps for runner in self._runners])

    def lead(self, drive: Callable[[StepExecutor], T], wrap: Callable[[Runner], Runner] = lambda same: same) -> T:
        """Runs `drive` on the leading rank while the others follow."""
        link: Any = Link(len(self._runners) - 1)
        executor = an_executor(wrap(LeadingRunner(self._runners[0], link)))

        def leader() -> T:
            try:
                return drive(executor)
            finally:
                link.send(b"")

        def follower(runner: ModelRunner, queue: "SimpleQueue[bytes]") -> None:
            while message := queue.get():
                rows, copies, moves, draws = decode_forward(message)
                runner.forward(rows, copies, moves=moves, draws=draws)

        pairs = zip(self._runners[1:], link.queues, strict=True)
        calls: list[Callable[[], Any]] = [leader, *[partial(follower, *pair) for pair in pairs]]
        result: T = at_once(calls)[0]
        return result

    def take_gathered(self) -> list[tuple[torch.dtype, tuple[int, ...]]]:
        """Returns type and shape of each tensor that the ranks gathered, and forgets them."""
        first, *others = [[(tensor.dtype, tuple(tensor.shape)) for tensor in group.gathered] for group in self.groups]
        assert all(other == first for other in others)
        for group in self.groups:
            group.gathered.clear()
        return first


Texts = Mapping[str, list[int]]


def a_draft(following: Sequence[int], is_tree: bool) -> DraftTree:
    """Returns the right tokens, and a wrong one behind them or, in a tree, beside the first."""
    wrong = (following[-1] + 1) % VOCABULARY
    if not is_tree:
        return DraftTree.chain((*following, wrong))
    return DraftTree((wrong, *following), (-1, -1, *range(1, len(following))))


def decode(executor: StepExecutor, expected: Texts | None = None) -> Texts:
    """Decodes all sessions, with drafts of up to two expected tokens; without expected texts, without speculation."""
    texts: dict[str, list[int]] = {opened.session: [*opened.tokens] for opened in OPENS}
    begins = dict.fromkeys(texts, 0)
    opens = OPENS
    while any(len(texts[opened.session]) < len(opened.tokens) + NEW_TOKENS for opened in OPENS):
        rows = []
        for at, (name, text) in enumerate(texts.items()):
            following = [] if expected is None else expected[name][len(text) : len(text) + 2]
            draft = a_draft(following, is_tree=name == "cool") if following else NO_TREE
            pages = tuple(range(at * PAGES_EACH, (at + 1) * PAGES_EACH))
            rows.append(Row(name, (*text[begins[name] :], *draft.tokens), begins[name], True, pages, draft))
            begins[name] = len(text) - 1
        for row, outcome in zip(rows, executor.step(StepPlan((), opens, tuple(rows))), strict=True):
            texts[row.session] += outcome.tokens_of(row)
        opens = ()
    return {opened.session: texts[opened.session][: len(opened.tokens) + NEW_TOKENS] for opened in OPENS}


@pytest.fixture(scope="module", params=["llama", "qwen3", "olmo2"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a checkpoint; the last architecture runs the model's own code, which gathers logits."""
    path = tmp_path_factory.mktemp(request.param)
    a_model(request.param, vocab_size=COLUMNS, initializer_range=0.3).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    a_model("llama", vocab_size=COLUMNS, initializer_range=0.3).save_pretrained(path)
    return path


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_decide_the_tokens_of_one_rank_and_of_gathered_logits(folder, ranks):
    """32 columns are not divisible by 3."""
    alone = decode(an_executor(a_runner(folder, SingleRank())))
    assert len({tuple(text[-NEW_TOKENS:]) for text in alone.values()}) == len(OPENS)
    target = Ranks(folder, ranks)
    assert target.lead(decode) == alone
    assert target.lead(partial(decode, expected=alone)) == alone
    assert target.lead(partial(decode, expected=alone), FromLogits) == alone


def test_a_rank_that_cannot_capture_its_steps_stops_the_start(llama):
    """If one rank ran its steps eagerly, the others would wait in a captured collective."""
    target = Ranks(llama, 3, captures=True)
    target.captures[1].limit = 2
    with pytest.raises(ModelError, match=r"out of memory; set .*cuda_graphs: false"):
        target.capture()


def test_captured_steps_of_ranks_decide_the_same_and_occur_on_all_ranks(llama):
    alone = decode(an_executor(a_runner(llama, SingleRank())))
    target = Ranks(llama, 3, captures=True)
    target.capture()
    assert target.lead(partial(decode, expected=alone)) == alone
    first, *others = [(capture.captures, capture.repeats) for capture in target.captures]
    assert first[0] == 2 * len(BUCKETS.tokens)
    assert first[1] >= NEW_TOKENS / 3
    assert others == [first, first]


SPECIAL = {
    "top_k": an_open(sampling=Sampling(top_k=5)),
    "top_p": an_open(sampling=Sampling(top_p=0.8)),
    "min_p": an_open(sampling=Sampling(min_p=0.1)),
    "penalty": an_open(sampling=Sampling(temperature=0.0, repetition_penalty=1.5)),
    "rules": an_open(rules=TokenRules(allowed=(4, 8, 20))),
    "grammar": an_open(grammar=LLMatcher.grammar_from_lark('start: "a" | "b"')),
    "rejection": an_open(sampling=Sampling(), acceptance=Acceptance.REJECTION),
    "scores": an_open(scoring=Scoring(2)),
    "prompt scores": an_open(scoring=Scoring(None, 1)),
    "margin": an_open(max_len=4, audit=True, rival=5),
}


def first_step(executor: StepExecutor, opens: Sequence[Open]) -> list[Outcome]:
    """Feeds the prompts of all sessions and decides a token of each."""
    rows = [Row(opened.session, opened.tokens, 0, True, (at,)) for at, opened in enumerate(opens)]
    return executor.step(StepPlan((), tuple(opens), tuple(rows)))


@pytest.mark.parametrize("opened", SPECIAL.values(), ids=SPECIAL)
def test_ranks_gather_logits_for_rows_that_read_them(llama, opened):
    """All other rows of the step are drawn from shards."""
    target = Ranks(llama, 3)
    drive = partial(first_step, opens=(*OPENS, opened))
    found = target.lead(drive)
    *candidates, whole = target.take_gathered()
    positions = len(OPENS) + 1 + (2 if opened.scoring.prompt_top is not None else 0)
    assert candidates == [(torch.float64, (2, positions)), (torch.float64, (2, 2))]
    assert whole == (torch.float32, (positions, WIDTH))
    assert found == target.lead(drive, FromLogits)
    alone = drive(an_executor(a_runner(llama, SingleRank())))
    assert [outcome.next_token for outcome in found] == [outcome.next_token for outcome in alone]


def test_ranks_exchange_candidates_alone_if_no_row_reads_logits(llama):
    """A prompt chunk with scores reads logits; later, its session does not."""
    target = Ranks(llama, 3)
    target.lead(partial(first_step, opens=OPENS))
    assert target.take_gathered() == [(torch.float64, (2, 4)), (torch.float64, (2, 2))]
    target.lead(partial(first_step, opens=OPENS[:1]))
    assert target.take_gathered() == [(torch.float64, (2, 1))]
    scored = an_open(tokens=(1, 2, 3, 4), scoring=Scoring(None, 0))
    chunk, rest = (Row("s", tokens, start, start > 0, (0,)) for tokens, start in (((1, 2), 0), ((3, 4), 2)))

    def in_chunks(executor: StepExecutor) -> list[int]:
        gathers = []
        for plan in (StepPlan((), (scored,), (chunk,)), StepPlan((), (), (rest,)), StepPlan((), (), (rest,))):
            executor.step(plan)
            gathers.append(len(target.take_gathered()))
        return gathers

    assert target.lead(in_chunks) == [2, 2, 1]
