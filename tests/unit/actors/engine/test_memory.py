"""Tests the number of a cache's pages, and the error for too little memory."""

from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from actors.engine import memory
from actors.engine.memory import GIB, Reserve, page_bytes, page_count, page_size_warning, step_logit_rows
from actors.engine.process import device_of
from cluster.config import CacheConfig, Resources
from cluster.errors import ModelError

CPU = torch.device("cpu")
SIZES: dict[str, Any] = {
    "vocab_size": 16,
    "hidden_size": 32,
    "intermediate_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def test_a_page_holds_keys_and_values_of_all_layers():
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    assert page_bytes(model, page_size=16) == 2 * 3 * 2 * 8 * 16 * 4
    assert page_bytes(model, page_size=16, ranks=2) == 3 * 2 * 8 * 16 * 4
    assert page_bytes(model.to(torch.bfloat16), page_size=4) == 2 * 3 * 2 * 8 * 4 * 2


def test_heads_of_a_size_of_their_own_and_models_without_shared_ones_are_counted_right():
    wide = LlamaForCausalLM(LlamaConfig(**SIZES, head_dim=24))
    assert page_bytes(wide, page_size=1) == 2 * 3 * 2 * 24 * 4
    gpt = GPT2LMHeadModel(GPT2Config(vocab_size=16, n_embd=32, n_layer=2, n_head=4, n_positions=32))
    assert page_bytes(gpt, page_size=1) == 2 * 2 * 4 * 8 * 4


def test_configured_memory_is_used():
    cache = CacheConfig(page_size=8, gib=0.5)
    assert page_count(cache, GIB // 64, sessions=1, context=8, device=CPU) == 32


@pytest.mark.parametrize(("free", "pages"), [(1000, 30), (50, 25), (20, 10)], ids=["enough", "half", "barely"])
def test_default_memory_is_the_sessions_need_or_half_the_free_memory(monkeypatch, free, pages):
    monkeypatch.setattr(memory, "free_bytes", lambda device: free)
    assert page_count(CacheConfig(page_size=8), 1, sessions=3, context=80, device=CPU) == pages


def a_gpu(monkeypatch: pytest.MonkeyPatch, free: int, total: int, ours: int) -> torch.device:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, total))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: ours)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    return torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("share", "free", "ours", "room"),
    [(1.0, 800, 200, 720), (0.25, 800, 200, 45), (0.25, 30, 200, 27), (0.5, 800, 0, 450)],
    ids=["alone", "a quarter", "a quarter that others have taken from", "a half without a model"],
)
def test_a_process_leaves_the_gpu_share_of_others(monkeypatch, share, free, ours, room):
    """A process takes nine tenths of its remaining share of 1000 bytes, or of free memory if less."""
    device = a_gpu(monkeypatch, free, 1000, ours)
    cache = CacheConfig(page_size=1)
    assert page_count(cache, 1, sessions=10_000, context=1, device=device, gpu_share=share) == room


@pytest.mark.parametrize(
    ("share", "free", "room"),
    [(1.0, 780, 630), (0.5, 780, 180), (0.5, 250, 153)],
    ids=["alone", "a half", "a half that others have taken from"],
)
def test_a_gpu_keeps_room_for_context_logits_and_graphs(monkeypatch, share, free, room):
    """Free memory excludes the context already, but a share does not."""
    device = a_gpu(monkeypatch, free, 1000, ours=200)
    reserve = Reserve(context=20, attention=10, logits=20, graphs=40, successor=10)
    assert page_count(CacheConfig(page_size=1), 1, 10_000, 1, device, share, reserve) == room


def test_a_reserve_beyond_the_share_leaves_no_room(monkeypatch):
    device = a_gpu(monkeypatch, 780, 1000, ours=200)
    with pytest.raises(ModelError, match="room for 0 tokens"):
        page_count(CacheConfig(page_size=1), 1, 10_000, 1, device, 0.25, Reserve(context=60))


def test_a_configured_cache_size_is_kept_beside_the_reserve():
    cache = CacheConfig(page_size=8, gib=0.5)
    assert page_count(cache, GIB // 64, 1, 8, CPU, reserve=Reserve(logits=GIB)) == 32


def test_only_a_gpu_reserves_a_context_and_only_captured_steps_graphs():
    gpu = torch.device("cuda", 0)
    logits = 160 * 128_000 * 4
    assert Reserve.of_steps(160, 128_000, CPU, graphs=48) == Reserve(logits=logits)
    target = Reserve.of_steps(160, 128_000, gpu, graphs=48)
    draft = Reserve.of_steps(160, 128_000, gpu)
    assert target.logits == draft.logits == logits
    assert target.context == draft.context == GIB // 2
    assert target.attention == draft.attention == GIB // 4
    assert target.graphs > draft.graphs == 0
    assert Reserve.of_steps(160, 128_000, gpu, graphs=96).graphs == 2 * target.graphs
    chained = Reserve.of_steps(160, 128_000, gpu, graphs=48, chain_steps=15)
    assert chained.graphs > target.graphs


@pytest.mark.parametrize(("sessions", "draft_tokens", "limit", "rows"), [(32, 4, 512, 160), (200, 4, 512, 512)])
def test_a_step_has_logits_for_every_session_s_block_up_to_its_limit(sessions, draft_tokens, limit, rows):
    assert step_logit_rows(sessions, draft_tokens, limit) == rows


@pytest.mark.parametrize("gib", [9.5 / 1024, None], ids=["given", "free"])
def test_too_little_memory_for_one_session_is_refused_with_the_required_size(monkeypatch, gib):
    monkeypatch.setattr(memory, "free_bytes", lambda device: 19 * GIB // 1024)
    with pytest.raises(ModelError, match=r"72 tokens, but a session may have 80: give the cache at least 0\.01 GiB"):
        page_count(CacheConfig(page_size=8, gib=gib), GIB // 1024, sessions=4, context=80, device=CPU)


def test_ranks_share_the_free_memory_of_a_machine(monkeypatch):
    monkeypatch.setattr(memory, "free_bytes", lambda device: 400)
    reserve = Reserve(logits=20)
    counts = [page_count(CacheConfig(page_size=1), 1, 10_000, 1, CPU, reserve=reserve, ranks=ranks) for ranks in (1, 2)]
    assert counts == [190, 90]


def test_a_container_has_no_more_than_its_limit(monkeypatch, tmp_path):
    whole = memory.free_bytes(CPU)
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(memory, "MEMORY_LIMITS", (tmp_path / "missing", limit))
    limit.write_text("12345\n")
    assert memory.free_bytes(CPU) == 12345, "without statistics"
    stat = tmp_path / "memory.stat"
    stat.write_text("anon 2000\nfile 9000\nshmem 300\n")
    assert memory.free_bytes(CPU) == 12345 - 2300
    stat.write_text("cache 9000\nrss 1\nshmem 1\ntotal_cache 9000\ntotal_rss 2000\ntotal_shmem 300\n")
    assert memory.free_bytes(CPU) == 12345 - 2300, "cgroup version 1"
    stat.write_text("anon 20000\nshmem 0\n")
    assert memory.free_bytes(CPU) == 0
    limit.write_text("max\n")
    assert whole / 2 < memory.free_bytes(CPU) < whole * 2


@pytest.mark.parametrize(
    ("page_size", "recurrent_kib", "proposed"),
    [(16, 64, None), (16, 640, 256), (256, 64_000, 1024), (1024, 64_000, None)],
)
def test_larger_pages_are_proposed_if_states_outweigh_keys(page_size, recurrent_kib, proposed):
    """Keys and values take 4 KiB per token."""
    warning = page_size_warning(page_size, page_size * 4096, recurrent_kib * 1024)
    assert warning == "" if proposed is None else f"page_size: {proposed}" in warning


@pytest.mark.parametrize(("gpus", "limits"), [(0.25, [0.125]), (1, []), (0, [])])
def test_a_process_with_a_share_of_a_gpu_cannot_exceed_it(monkeypatch, gpus, limits):
    """The memory of its CUDA context, which torch does not limit, is part of the share."""
    a_gpu(monkeypatch, free=GIB, total=4 * GIB, ours=0)
    set_limits: list[float] = []
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda share, device: set_limits.append(share))
    assert device_of(Resources(num_gpus=gpus)).type == ("cuda" if gpus else "cpu")
    assert set_limits == limits


def test_a_share_without_room_for_a_context_is_refused(monkeypatch):
    a_gpu(monkeypatch, free=GIB, total=4 * GIB, ours=0)
    with pytest.raises(ModelError, match=r"num_gpus is 0\.1"):
        device_of(Resources(num_gpus=0.1))
