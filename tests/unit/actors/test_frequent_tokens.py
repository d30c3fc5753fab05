"""A head over frequent tokens gives their logits unchanged, and no chance to all others."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from actors.methods.frequent_tokens import FILE, FrequentTokensHead, read_frequent_tokens, reduce_head
from cluster.errors import ModelError


def test_frequent_logits_stay_and_others_are_excluded() -> None:
    head, ids = nn.Linear(4, 10, bias=False), torch.tensor([1, 4, 9])
    hidden = torch.randn(2, 3, 4)
    reduced = FrequentTokensHead(head, ids)(hidden)
    others = [i for i in range(10) if i not in ids.tolist()]
    torch.testing.assert_close(reduced[..., ids], head(hidden)[..., ids])
    assert torch.isneginf(reduced[..., others]).all()


def test_a_tied_embedding_is_left_whole() -> None:
    """Tokens that are never proposed are still fed."""
    config = LlamaConfig(
        vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    reduce_head(model, torch.tensor([0, 3]))
    assert model.get_input_embeddings().weight.shape == (16, 8)
    assert model(torch.tensor([[5, 15]])).logits.shape == (1, 2, 16)


@pytest.mark.parametrize("content", [[], [16], [-1], ["a"], {"ids": [1]}])
def test_a_wrong_file_is_refused(tmp_path: Path, content: object) -> None:
    (tmp_path / FILE).write_text(json.dumps(content))
    with pytest.raises(ModelError, match=FILE):
        read_frequent_tokens(tmp_path, 16)


def test_no_file_means_the_whole_head(tmp_path: Path) -> None:
    assert read_frequent_tokens(tmp_path, 16) is None
