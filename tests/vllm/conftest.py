"""These tests need vLLM, which has an environment of its own: `make test-vllm` makes it."""

import os
from pathlib import Path

import pytest
import torch

from actors.vllm_engine.arguments import ENVIRONMENT

pytest.importorskip("vllm", reason="vLLM is not installed here; run `make test-vllm`")

for name, setting in {**ENVIRONMENT, "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"}.items():
    os.environ.setdefault(name, setting)
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two random layers whose logits are far apart, so that rounding decides nothing."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        initializer_range=0.3,
    )
    folder = tmp_path_factory.mktemp("tiny_llama")
    LlamaForCausalLM(config).float().save_pretrained(folder)
    return folder
