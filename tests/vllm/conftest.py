"""These tests need vLLM in its own environment, created by `make test-vllm`."""

import os
from pathlib import Path

import pytest
import torch

from actors.vllm_engine.arguments import ENVIRONMENT
from tests.byte_tokenizer import byte_tokenizer
from tests.vllm import second_runner
from tests.vllm.adapters import ADAPTERS, save_adapter, texts_of_vllm
from tests.vllm.cases import on_own_engine, open_all
from tests.vllm.scripted import Life, Scripts

if second_runner.IS_ASKED_FOR:
    second_runner.interpret_kernels()
pytest.importorskip("vllm", reason="vLLM is not installed here; run `make test-vllm`")

for name, setting in {**ENVIRONMENT, "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"}.items():
    os.environ.setdefault(name, setting)
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Creates a random two-layer model with well-separated logits, so rounding changes no token."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=264,  # five more than the tokenizer's
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        initializer_range=0.3,
        eos_token_id=256,  # same as the tokenizer's
    )
    folder = tmp_path_factory.mktemp("tiny_llama")
    LlamaForCausalLM(config).float().save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def own_lives(tiny_llama: Path) -> dict[str, Life]:
    own = on_own_engine(tiny_llama)
    open_all(own)
    own.run(Scripts({}).none)
    return own.lives


@pytest.fixture(scope="session")
def whole(own_lives: dict[str, Life]) -> dict[str, list[int]]:
    """Returns texts with their prompts, from Slipstream's own engine without drafts."""
    return {session: life.prefix.tokens for session, life in own_lives.items()}


@pytest.fixture(scope="session")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Returns the folders of two random LoRA adapters of `tiny_llama`, by name."""
    return {name: save_adapter(tmp_path_factory.mktemp(name), seed) for seed, name in enumerate(ADAPTERS)}


@pytest.fixture(scope="session")
def adapted(tiny_llama: Path, adapters: dict[str, str]) -> dict[str, list[int]]:
    """Returns unmodified vLLM's greedy texts of the base and its adapters."""
    return texts_of_vllm(tiny_llama, adapters)
