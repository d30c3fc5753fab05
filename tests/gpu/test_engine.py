"""The engine gives equal results on GPU and CPU for every attention backend, and waits for the device once per step."""

import warnings
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from actors.attention import AttentionBackend, ScoreOptions, StepSizes
from actors.attention.flashinfer import flashinfer_for
from actors.attention.flat_rows import FlatRows
from actors.attention.paged import paged_for, step_integers, step_tensors
from actors.attention.sdpa_gather import SdpaGather
from actors.attention.select_backend import BACKEND_ERRORS, TOLERANCE, AttentionShape, Trial, choose_attention
from actors.attention.varlen import varlen_for
from actors.compute.kv_cache import InputRow
from actors.engine.executor import StepExecutor
from actors.engine.runner import ModelRunner
from actors.sampling.acceptance import DrawAddress, PendingBlock, decide
from actors.sampling.logits_processors import chain_of
from actors.sampling.truncation import filtered
from cluster.verification.step import Row, StepPlan
from protos.draft_tree import DraftTree, SparseProbs
from protos.messages import Acceptance, Open, Sampling, TokenRules
from tests.unit.actors.tiny_models import MODELS, jittered, tokens_of
from tests.unit.cluster.samples import an_open

pytestmark = pytest.mark.gpu
PAGE_SIZE = 16
SHAPE = AttentionShape(layers=2, heads=8, kv_heads=2, head_dim=64, page_size=PAGE_SIZE, dtype=torch.bfloat16)
LIBRARIES: dict[str, Callable[[torch.device], AttentionBackend]] = {
    "paged": paged_for,
    "flashinfer": flashinfer_for,
    "varlen": varlen_for,
}


@pytest.mark.parametrize("name", LIBRARIES)
@torch.inference_mode()
def test_each_installed_library_attends_as_gathering_does(name, device):
    try:
        backend = LIBRARIES[name](device)
    except BACKEND_ERRORS as error:
        pytest.skip(f"{name} cannot be used here: {error}")
    trial = Trial(SHAPE, device)
    tolerance = TOLERANCE[SHAPE.dtype]
    for window in trial.windows:
        expected = trial.attend(SdpaGather(), window)
        torch.testing.assert_close(trial.attend(backend, window), expected, atol=tolerance, rtol=tolerance)


@torch.inference_mode()
def test_trees_and_soft_caps_of_the_own_kernel_are_those_of_gathering(device):
    tolerance = TOLERANCE[SHAPE.dtype]
    trial = Trial(replace(SHAPE, plain=False, capped=True), device)
    for window in trial.windows:
        expected = trial.attend(SdpaGather(), window, trees=True)
        found = trial.attend(paged_for(device), window, trees=True)
        torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


@torch.inference_mode()
def test_a_captured_kernel_serves_other_steps_with_the_bits_of_each_row_alone(device):
    """Also compares partial results with one pass. Padding holds NaN queries and invalid pages."""
    from actors.attention.paged_kernel import attend

    generator = torch.Generator(device).manual_seed(3)
    pool = torch.randn(300 * PAGE_SIZE, 4, 64, generator=generator, device=device).bfloat16()
    query = torch.full((64, 8, 64), torch.nan, device=device).bfloat16()
    sizes = StepSizes(64, 8, 100)
    pages = tuple(range(300))
    steps = [
        [InputRow((1,) * 5, 700, 1, pages), InputRow((1,), 1300, 1, pages[::-1])],
        [InputRow((1,) * 4, 90, 1, pages[7:], (-1, 0, -1)), InputRow((1,) * 40, 600, 1, pages[9:])],
    ]

    def numbers(rows: list[InputRow]) -> list[torch.Tensor]:
        return [torch.tensor(part, device=device) for part in step_integers(FlatRows(rows, PAGE_SIZE), sizes)]

    fixed = numbers(steps[0])
    step = step_tensors(fixed, sizes)
    attend(step, query, pool, PAGE_SIZE, ScoreOptions())  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = attend(step, query, pool, PAGE_SIZE, ScoreOptions())
    for rows in steps:
        total = sum(len(row.tokens) for row in rows)
        query.fill_(torch.nan)[:total] = torch.randn(total, 8, 64, generator=generator, device=device)
        for part, contents in zip(fixed, numbers(rows), strict=True):
            part.copy_(contents)
        step.block_table[len(rows) :] = 10**12
        graph.replay()
        assert captured[total:].eq(0).all()
        assert torch.equal(captured, attend(step, query, pool, PAGE_SIZE, ScoreOptions(), workspace_bytes=0))
        begin = 0
        for row in rows:
            own = slice(begin, begin + len(row.tokens))
            alone = step_tensors(
                [torch.tensor(part, device=device) for part in step_integers(FlatRows([row], PAGE_SIZE), sizes)], sizes
            )
            padded = torch.cat([query[own], query[: 64 - len(row.tokens)]])
            assert torch.equal(captured[own], attend(alone, padded, pool, PAGE_SIZE, ScoreOptions())[: len(row.tokens)])
            begin = own.stop


def test_the_selection_reports_all_trials(device):
    backend, report = choose_attention(SHAPE, device)
    assert report.chosen == backend.name
    assert [tried.name for tried in report.tried] == ["gathered", "paged", "flashinfer", "varlen"]
    assert all((tried.step_ms is None) == bool(tried.refused) for tried in report.tried)


@pytest.mark.parametrize("name", MODELS)
def test_logits_of_mixed_rows_are_those_of_a_cpu(name, device):
    """Runs in float32 without rounding products to TF32."""
    assert not torch.backends.cuda.matmul.allow_tf32
    torch.manual_seed(3)
    model = jittered(MODELS[name]())
    twin = MODELS[name]()
    twin.load_state_dict(model.state_dict())
    runners = [ModelRunner(model, 32, PAGE_SIZE), ModelRunner(twin.to(device).eval(), 32, PAGE_SIZE, SdpaGather())]
    a = tokens_of(1, 60)
    b = tokens_of(2, 33)
    steps = [
        [InputRow(a[:50], 0, 1, (7, 2, 9, 4)), InputRow(b[:32], 0, 0, (1, 30))],
        [InputRow(a[50:], 50, 10, (7, 2, 9, 4)), InputRow(b[32:], 32, 1, (1, 30, 3))],
    ]
    for rows in steps:
        expected, found = (runner.forward(rows).logits.cpu() for runner in runners)
        torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)


ASKED = [
    an_open(tokens=(4, 4, 7), prompt_len=1, sampling=sampling, rules=rules)
    for sampling, rules in (
        (Sampling(temperature=0.0), TokenRules()),
        (Sampling(temperature=0.0, presence_penalty=0.5), TokenRules()),
        (Sampling(repetition_penalty=1.3, frequency_penalty=0.2), TokenRules()),
        (Sampling(), TokenRules()),
        (Sampling(), TokenRules(logit_bias=((1, 2.0), (9, -5.0)), bad_words=((1, 2), (6,)))),
        (Sampling(temperature=0.8, top_k=20, top_p=0.9), TokenRules()),
        (Sampling(min_p=0.05), TokenRules(allowed=tuple(range(40)))),
    )
]


def pending(asked: Open, rule: Acceptance, draft: DraftTree, seed: int) -> PendingBlock:
    """Returns a session that has committed all of its tokens except the draft."""
    chain = chain_of(asked)
    if chain is not None:
        chain.follow(asked.tokens)
    return PendingBlock(rule, asked.sampling, draft, chain, DrawAddress(seed, 0, 50))


def some_blocks() -> list[PendingBlock]:
    probs = SparseProbs(((1, 5, 9), (2, 6, 0)), ((30, 5, 1), (9, 9, 0)))
    return [
        pending(asked, rule, draft, seed)
        for rule, draft in (
            (Acceptance.REJECTION, DraftTree.chain((1, 2), probs)),
            (Acceptance.COUPLED, DraftTree((1, 2), (-1, -1))),
        )
        for asked in ASKED
        for seed in range(6)
    ]


def test_decisions_equal_those_of_a_cpu(device):
    blocks = some_blocks()
    logits = 3 * torch.randn(3 * len(blocks), 50_000, generator=torch.Generator().manual_seed(1))
    logits[:, :10] += 8
    assert decide(some_blocks(), logits.to(device)) == decide(blocks, logits)


def a_large_model(device: torch.device) -> PreTrainedModel:
    torch.manual_seed(4)
    config = LlamaConfig(
        vocab_size=32_000, hidden_size=512, intermediate_size=1024, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=2, head_dim=64,
    )  # fmt: skip
    return LlamaForCausalLM(config).to(device).eval()


def test_top_p_keeps_the_same_tokens_of_one_position_as_of_several(device):
    torch.manual_seed(0)
    logits = torch.randn(9, 50_000, device=device)
    for top_p in (0.1, 0.5, 0.9, 0.99):
        sampling = Sampling(top_p=top_p)
        together = filtered(logits, sampling)
        assert torch.equal(together, torch.cat([filtered(position, sampling) for position in logits.split(1)]))


def test_the_host_waits_for_the_device_once_a_step(device):
    """torch warns about each synchronization; the only one is the copy of the decisions.

    Uses float32, because ties of bfloat16 logits at the edge of top-k would cause a second decision of the block.
    """
    executor = StepExecutor(ModelRunner(a_large_model(device), 64, PAGE_SIZE), 32_000)
    opens = tuple(
        an_open(str(i), tokens=tokens_of(i, 20), sampling=asked.sampling, rules=asked.rules)
        for i, asked in enumerate(ASKED)
    )
    prompts = tuple(
        Row(request.session, request.tokens, 0, True, (2 * i, 2 * i + 1)) for i, request in enumerate(opens)
    )
    blocks = tuple(Row(row.session, (1, 2, 3), 20, True, row.pages, DraftTree.chain((2, 3))) for row in prompts)
    executor.step(StepPlan((), opens, prompts))
    executor.step(StepPlan((), (), blocks))  # warm-up of lazy initialization
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            executor.step(StepPlan((), (), blocks))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    waits = [str(warning.message) for warning in caught if "synchronizing CUDA operation" in str(warning.message)]
    assert len(waits) == 1, waits
