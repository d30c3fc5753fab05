"""Captured chains draft the blocks of a CPU, and the host waits for the device once per block."""

import warnings
from typing import Any

import pytest
import torch

from actors.attention.paged import paged_for
from actors.compute.capture import CudaCapture
from actors.drafters.model.draft_cache import DraftCache
from actors.drafters.model.draft_model import DraftModel
from actors.drafters.model.sampling import DraftingLimits
from actors.engine.runner import ModelRunner
from actors.engine.static_step import Buckets, Recording
from protos.messages import Sampling
from tests.unit.actors.drafters.drafting import propose, wanted_block
from tests.unit.actors.tiny_models import MODELS, VOCABULARY, jittered, tokens_of
from tests.unit.cluster.samples import GREEDY

pytestmark = pytest.mark.gpu
PAGE_SIZE = 16
PAGES = 64
WANTS = [
    wanted_block(tokens_of(at, 3 + 17 * at), tokens, f"s{at}", draft_tokens=8, max_len=250, sampling=sampling, seed=at)
    for at, (tokens, sampling) in enumerate(
        [(8, GREEDY), (3, Sampling(temperature=1.0)), (5, Sampling(temperature=0.6)), (1, GREEDY), (6, GREEDY)]
    )
]


def a_draft(runner: ModelRunner, device: torch.device) -> DraftModel:
    return DraftModel(runner, torch.arange(VOCABULARY, device=device), DraftCache(PAGES, PAGE_SIZE), DraftingLimits(4))


def a_model() -> Any:
    torch.manual_seed(3)
    return jittered(MODELS["llama"]())


def a_chained_draft(device: torch.device) -> DraftModel:
    attention = paged_for(device)
    recording = Recording(Buckets.for_sessions(16, 256, PAGE_SIZE, attention), CudaCapture())
    return a_draft(ModelRunner(a_model().to(device), PAGES, PAGE_SIZE, attention, recording=recording), device)


def test_chains_draft_the_blocks_of_a_cpu(device):
    """In float32; the second blocks replay chains that the first ones have captured."""
    chained = a_chained_draft(device)
    expected = a_draft(ModelRunner(a_model(), PAGES, PAGE_SIZE), torch.device("cpu"))
    for wants in (WANTS, [want.after(4, 5) for want in WANTS], WANTS[:1]):
        found = propose(chained, wants)
        for block, other in zip(found, propose(expected, wants), strict=True):
            assert block == other
            assert block.chances == pytest.approx(other.chances, rel=1e-2)


def test_the_host_waits_for_the_device_once_a_block(device):
    """torch warns about each synchronization; the only one is the copy of the candidates."""
    chained = a_chained_draft(device)
    propose(chained, WANTS)
    propose(chained, [want.after(4) for want in WANTS])  # captures the step that reads verdicts
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            propose(chained, [want.after(4, 5) for want in WANTS])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    waits = [str(warning.message) for warning in caught if "synchronizing CUDA operation" in str(warning.message)]
    assert len(waits) == 1, waits
