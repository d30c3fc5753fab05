"""A head over frequent tokens gives their logits unchanged, and none of others."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from actors.drafters.model.forwards import FILE, read_frequent_tokens, reduce_head
from cluster.errors import ModelError


def a_model(tied: bool) -> LlamaForCausalLM:
    torch.manual_seed(2)
    config = LlamaConfig(
        vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, tie_word_embeddings=tied,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


@pytest.mark.parametrize("tied", [True, False])
@torch.inference_mode()
def test_the_logits_of_what_is_kept_stay_the_same_in_the_order_of_the_ids(tied: bool) -> None:
    model = a_model(tied)
    ids = torch.tensor([1, 4, 9])
    tokens = torch.tensor([[5, 15, 2]])
    whole = model(tokens).logits
    reduce_head(model, ids)
    torch.testing.assert_close(model(tokens).logits, whole[..., ids])


@torch.inference_mode()
def test_a_bias_goes_with_its_tokens() -> None:
    model = a_model(tied=False)
    ids = torch.tensor([3, 7])
    model.set_output_embeddings(nn.Linear(8, 16, bias=True))
    whole = model(torch.tensor([[5]])).logits
    reduce_head(model, ids)
    torch.testing.assert_close(model(torch.tensor([[5]])).logits, whole[..., ids])


def test_a_tied_embedding_is_left_whole() -> None:
    """Tokens that are never proposed are still fed."""
    model = a_model(tied=True)
    before = model.get_input_embeddings().weight.clone()
    reduce_head(model, torch.tensor([0, 3]))
    torch.testing.assert_close(model.get_input_embeddings().weight, before)
    assert model(torch.tensor([[5, 15]])).logits.shape == (1, 2, 2)


def test_a_head_that_is_no_matrix_is_refused() -> None:
    model = a_model(tied=False)
    model.set_output_embeddings(nn.Identity())
    with pytest.raises(ModelError, match="linear head to be reduced, not Identity"):
        reduce_head(model, torch.tensor([0]))


@pytest.mark.parametrize("content", [[], [16], [-1], ["a"], {"ids": [1]}])
def test_a_wrong_file_is_refused(tmp_path: Path, content: object) -> None:
    (tmp_path / FILE).write_text(json.dumps(content))
    with pytest.raises(ModelError, match=FILE):
        read_frequent_tokens(tmp_path, 16)


def test_no_file_means_the_whole_head(tmp_path: Path) -> None:
    assert read_frequent_tokens(tmp_path, 16) is None
