"""Every drafting method is exact over Ray, gRPC and HTTP, with chains and trees, on 1 rank and on 3.

For each method, each published layout of a head that reads the target's states, and each tensor-parallel size:

* greedy answers equal those of `generate`, with one-token drafts and with trees;
* a seed gives one text at temperature 0.7, without drafts, with chains and with trees: the text of the first server
  without drafts. The final table has a row for each server;
* under rejection sampling, a chi-square test compares words with non-speculative decoding; the false-alarm rate of all
  servers together is below 1e-3;
* every case has accepted drafts.

Heads have memorized the greedy answers to `PROMPTS`. The method mtp is not tested: it drafts with modules in the
target's checkpoint, and the demo's target has none.

Not part of the default suite: `make test-exhaustive`. One method: `-k "medusa"`.
"""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table

from actors.drafters.registry import MODULES
from serve_app.cli.demo import demo_config
from tests.exhaustive.heads_by_heart import MemorizedHeads
from tests.exhaustive.test_exactness import homogeneity
from tests.integration.serving import Reference, Served, demo_served
from tests.integration.test_serving import assert_nothing_left

MODEL = "SmolLM2-135M-Instruct"
# Answers begin in many ways; some repeat a line, so even n-gram drafting proposes their second word.
LINES = "Say one of these lines:\nThe red fox ran.\nA green frog sat.\nMy old dog slept.\nOur blue bird sang."
PROMPTS = (
    LINES,
    "Repeat three times: The cat sat on the mat, and the dog lay by the door.",
    "Count from one to twenty.",
)
ANSWER = 40
SEED = 42
NONE = 0  # draft tokens of a request
CHAIN = 1
TREE = 8
REJECTION_CHAIN = 4  # rejection sampling uses only chains, of any length
PATIENCE = 10  # attempts until a draft is accepted; the controller may pause speculation for seconds
DRAWS = 300  # under rejection sampling, per server
PLAIN_DRAWS = 900  # shared by all servers
WORD_TOKENS = 4  # nearly always contain two words
AT_ONCE = 8
FALSE_ALARM = 2e-5  # for each of the 44 comparisons

LAYOUTS = {  # drafting method by layout of the head
    "eagle3": "eagle",
    "eagle1": "eagle",
    "p_eagle": "eagle",
    "medusa": "medusa",
    "mlp_speculator": "mlp_speculator",
    "dflash": "dflash",
}
DEMO_DRAFT = demo_config().draft.model
OTHERS = {  # configurations of methods that need no head
    "draft_model": f"method: draft_model, model: {DEMO_DRAFT}",
    "hybrid": f"method: hybrid, model: {DEMO_DRAFT}",
    "ngram": "method: ngram",
    "suffix": "method: suffix",
    "layer_skip": "method: layer_skip, layer_skip: {layers: 8}",
}
IMPOSSIBLE = {"mtp"}
# Their drafts are so rarely accepted without a seed that the adaptive schedule requests almost none.
LOW_ACCEPTANCE = {"ngram", "layer_skip", *LAYOUTS}
SERVERS = [*product([*OTHERS, *LAYOUTS], (1, 3))]


@dataclass(frozen=True)
class Answers:
    """Answers to several requests, with draft counts."""

    texts: list[str]
    drafted: int
    accepted: int


@dataclass
class Plainly:
    """The first server's answers without speculation, which all others must match."""

    texts: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    table: list[tuple[str, ...]] = field(default_factory=list)  # a row for each server


@pytest.fixture(scope="session")
def heads(tmp_path_factory: pytest.TempPathFactory) -> MemorizedHeads:
    return MemorizedHeads(Path(demo_config().model.target), PROMPTS, ANSWER, tmp_path_factory.mktemp("heads"))


@pytest.fixture(scope="session")
def reference() -> Reference:
    return Reference(demo_config().model.target)


@pytest.fixture(scope="session")
def plainly() -> Iterator[Plainly]:
    found = Plainly()
    yield found
    table = Table(*("method", "ranks", "none", "chain", "tree", "accepted of drafted"), title="A seed's texts")
    for row in found.table:
        table.add_row(*row)
    Console().print(table)


@pytest.fixture(scope="module", params=SERVERS, ids=[f"{name}, {ranks} rank(s)" for name, ranks in SERVERS])
def server(request: pytest.FixtureRequest) -> tuple[str, int]:
    name, ranks = request.param
    return str(name), int(ranks)


@pytest.fixture(scope="module")
def served(server: tuple[str, int], heads: MemorizedHeads) -> Iterator[Served]:
    """Runs one server per method and tensor-parallel size, with the default schedule if it drafts."""
    name, ranks = server
    draft = OTHERS.get(name) or f"method: {LAYOUTS[name]}, model: {heads.folder(name)}"
    with demo_served(
        f"draft={{{draft}, resources: {{num_cpus: 0.3}}}}",
        f"target.tensor_parallel={ranks}",
        f"speculation.schedule={'lock_step' if name in LOW_ACCEPTANCE else 'adaptive'}",
        "target.resources_per_rank.num_cpus=0.3",
    ) as served:
        yield served
        assert_nothing_left(served)


async def asked(
    served: Served, prompts: list[str], at_once: int, nodes: int, acceptance: str = "coupled", **options: object
) -> Answers:
    places = asyncio.Semaphore(at_once)
    speculation = {"draft_tokens": nodes, "acceptance": acceptance}

    async def one(prompt: str) -> tuple[str, int, int]:
        async with places:
            answer = await client.chat.completions.create(
                model=MODEL,
                messages=[{"role": "user", "content": prompt}],
                extra_body={"speculation": speculation},
                **options,  # type: ignore[call-overload]
            )
        details = answer.usage.completion_tokens_details
        accepted = details.accepted_prediction_tokens or 0
        return str(answer.choices[0].message.content), accepted + (details.rejected_prediction_tokens or 0), accepted

    async with served.async_client as client:
        found = await asyncio.gather(*(one(prompt) for prompt in prompts))
    return Answers([text for text, _, _ in found], sum(each[1] for each in found), sum(each[2] for each in found))


async def ask_until_accepted(served: Served, nodes: int, **options: object) -> list[Answers]:
    """Sends each prompt alone, then all together, until some drafts have been accepted."""
    rounds: list[Answers] = []
    for _ in range(PATIENCE):
        for at_once in (1, len(PROMPTS)):
            rounds.append(await asked(served, [*PROMPTS], at_once, nodes, max_tokens=ANSWER, **options))
            if sum(each.accepted for each in rounds):
                return rounds
    raise AssertionError(f"no draft token was accepted, of {sum(each.drafted for each in rounds)}: this showed nothing")


def test_no_method_is_forgotten() -> None:
    assert {*OTHERS, *LAYOUTS.values()} | IMPOSSIBLE == set(MODULES)


@pytest.mark.parametrize("nodes", [CHAIN, TREE], ids=["chain", "tree"])
async def test_greedy_text_equals_plain_generate(served: Served, reference: Reference, nodes: int) -> None:
    rounds = await ask_until_accepted(served, nodes, temperature=0.0)
    for prompt, text in [pair for each in rounds for pair in zip(PROMPTS, each.texts, strict=True)]:
        reference.assert_greedy(prompt, ANSWER, text)
    print(f"\naccepted {[each.accepted for each in rounds]} of {[each.drafted for each in rounds]}")


async def test_a_seed_fixes_the_text_for_any_drafts(served: Served, server: tuple[str, int], plainly: Plainly) -> None:
    options = {"temperature": 0.7, "seed": SEED}
    without = await asked(served, [*PROMPTS], len(PROMPTS), NONE, max_tokens=ANSWER, **options)
    assert without.drafted == 0
    if not plainly.texts:
        plainly.texts = without.texts
        assert len(set(without.texts)) == len(PROMPTS)
    drafted = {nodes: await ask_until_accepted(served, nodes, **options) for nodes in (CHAIN, TREE)}
    is_equal = [all(each.texts == plainly.texts for each in rounds) for rounds in ([without], *drafted.values())]
    answers = [each for rounds in drafted.values() for each in rounds]
    name, ranks = server
    share = f"{sum(each.accepted for each in answers)} of {sum(each.drafted for each in answers)}"
    plainly.table.append((name, str(ranks), *("equal" if each else "DIFFERS" for each in is_equal), share))
    assert all(is_equal), (plainly.texts, without.texts, drafted)


async def test_under_ratio_words_follow_plain_decoding(served: Served, plainly: Plainly) -> None:
    """Tests the homogeneity of two samples at the first and at the second word."""
    options = {"temperature": 1.0, "max_tokens": WORD_TOKENS}
    if not plainly.lines:
        plainly.lines = (await asked(served, [LINES] * PLAIN_DRAWS, AT_ONCE, NONE, **options)).texts
    rounds: list[Answers] = []
    while sum(each.accepted for each in rounds) == 0:  # the adaptive schedule requests nothing on a slow machine
        assert len(rounds) < PATIENCE, "no draft token was accepted: this showed nothing"
        rounds.append(await asked(served, [LINES] * DRAWS, AT_ONCE, REJECTION_CHAIN, "rejection", **options))
    print(f"\naccepted {[each.accepted for each in rounds]} of {[each.drafted for each in rounds]}")
    texts = [text for each in rounds for text in each.texts]
    for place in (0, 1):
        assert homogeneity(words(plainly.lines, place), words(texts, place)) > FALSE_ALARM


def words(texts: list[str], place: int) -> list[str]:
    """Returns the word at this place in each text; truncated words count."""
    return [[*text.split(), "", ""][place] for text in texts]
