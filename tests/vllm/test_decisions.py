"""Tests decisions in special cases: requests of vLLM itself, steps in several parts, and NaN logits."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from actors.vllm_engine.coupled_sampler import FedBlock, extra_args
from actors.vllm_engine.noise_processor import VOCABULARY_KEY, SharedNoise
from protos.messages import RefusalReason, Sampling, Scoring
from tests.vllm.cases import config, on_own_engine, on_vllm
from tests.vllm.scripted import VOCABULARY, Scripts, request

GREEDY = Sampling(temperature=0.0)
PROMPT = [7, 8, 9, 10]
BROKEN = 250  # token whose embedding is NaN


def a_processor(*names: str) -> SharedNoise:
    """Returns a processor with a scored request per name, all of which decide a token after their prompts."""
    states = SimpleNamespace(
        prefill_len=SimpleNamespace(np=np.full(8, len(PROMPT))),
        all_token_ids=SimpleNamespace(gpu=torch.tensor([PROMPT] * 8)),
    )
    processor = SharedNoise(SimpleNamespace(additional_config={VOCABULARY_KEY: VOCABULARY}), states)
    for slot, name in enumerate(names):
        opened = request(name, GREEDY, PROMPT, scoring=Scoring(top=2))
        assert processor.add_request(slot, SimpleNamespace(extra_args=extra_args(opened)))
    processor.names = dict(enumerate(names))
    processor.begin({name: FedBlock(len(PROMPT), ()) for name in names})
    return processor


def of_slots(slots: Sequence[int]) -> Any:
    return SimpleNamespace(idx_mapping_np=np.array(slots))


def some_logits(rows: int) -> torch.Tensor:
    return torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(1))


def test_vllms_own_requests_keep_their_logits() -> None:
    """On GPUs, vLLM warms up with such requests before the worker extension is installed."""
    processor = a_processor()
    assert not processor.add_request(3, SimpleNamespace(extra_args=None))
    logits = some_logits(1)
    assert torch.equal(processor.apply(logits.clone(), of_slots([3])), logits)


def test_results_of_all_parts_of_a_step_are_kept() -> None:
    processor = a_processor("a", "b", "c")
    logits = some_logits(3)
    logits[1] = torch.nan
    whole = logits.argmax(dim=-1).tolist()
    for slots in ([0, 1], [2]):
        applied = processor.apply(logits[slots], of_slots(slots))
        drawn = dict(zip(slots, applied.argmax(dim=-1).tolist(), strict=True))
        assert all(drawn[slot] == whole[slot] for slot in slots if slot != 1)
    assert processor.extra_results.keys() == {"a", "b", "c"}
    assert processor.undecided == {"b"}
    processor.begin({})
    assert not processor.extra_results
    assert not processor.undecided


def test_a_session_with_nan_logits_ends_without_a_token_and_alone(tiny_llama: Path, tmp_path: Path) -> None:
    from actors.vllm_engine.core import start_core

    shutil.copytree(tiny_llama, tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.embed_tokens.weight"][BROKEN] = torch.nan
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    sound = request("sound", GREEDY, PROMPT, 10)
    own = on_own_engine(tiny_llama)
    own.open(sound)
    own.run(Scripts({}).none)
    core = start_core(config(tmp_path), str(tmp_path), VOCABULARY)
    try:
        target = on_vllm(core)
        target.open(sound)
        target.open(request("broken", GREEDY, [*PROMPT, BROKEN], 10))
        target.run(Scripts({}).none)
        assert core.is_idle
    finally:
        core.close()
    lives = target.lives
    assert (lives["broken"].text, lives["broken"].refused) == ([], RefusalReason.NONFINITE_LOGITS)
    assert (lives["sound"].text, lives["sound"].refused) == (own.lives["sound"].text, None)
