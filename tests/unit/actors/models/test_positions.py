"""Context length: positions, and what RoPE scaling makes of them."""

from typing import Any

import pytest
from transformers import BloomConfig, Gemma3TextConfig, GPT2Config, LlamaConfig, Phi3Config, Qwen2Config, XLNetConfig

from actors.models.layer_subset import context_length, uses_rope

YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0}


def llama(positions: int, **scaling: Any) -> LlamaConfig:
    return LlamaConfig(max_position_embeddings=positions, rope_parameters={"rope_theta": 10000.0, **scaling})


@pytest.mark.parametrize(
    ("positions", "scaling", "context"),
    [
        (4096, {"rope_type": "default"}, 4096),
        (4096, {"rope_type": "linear", "factor": 4.0}, 16384),
        (32768, YARN | {"original_max_position_embeddings": 32768}, 131072),
        (131072, YARN | {"original_max_position_embeddings": 32768}, 131072),
        (40960, YARN | {"original_max_position_embeddings": 32768}, 131072),
        (163840, YARN | {"factor": 40, "original_max_position_embeddings": 4096}, 163840),
        (64, YARN, 256),
        (4096, {"rope_type": "dynamic", "factor": 4.0}, 4096),
        (
            131072,
            {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
            131072,
        ),
    ],
    ids=["default", "linear", "qwen", "qwen-extended", "qwen3", "deepseek", "yarn-alone", "dynamic", "llama3"],
)
def test_scaling_extends_the_context_as_published_checkpoints_mean_it(
    positions: int, scaling: dict[str, Any], context: int
) -> None:
    assert context_length(llama(positions, **scaling)) == context


def test_the_older_spelling_of_a_scaling_counts_too() -> None:
    config = Qwen2Config(
        max_position_embeddings=32768,
        rope_scaling={"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
    )
    assert context_length(config) == 131072


def test_longrope_has_its_length_in_max_position_embeddings() -> None:
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "rope_type": "longrope", "rope_theta": 10000.0}
    config = Phi3Config(
        hidden_size=64,
        num_attention_heads=4,
        max_position_embeddings=131072,
        original_max_position_embeddings=4096,
        rope_parameters=factors,
    )
    assert context_length(config) == 131072


def test_layers_scaled_apart_count_as_the_shortest_of_them() -> None:
    """Gemma 3 scales full attention alone, and max_position_embeddings has the extended length."""
    scaled = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    assert context_length(Gemma3TextConfig(max_position_embeddings=131072, rope_parameters=scaled)) == 131072


def test_a_model_without_rope_ignores_a_scaling_that_its_file_carries() -> None:
    config = GPT2Config(n_positions=64, rope_parameters={"rope_type": "linear", "factor": 4.0})
    assert not uses_rope(config)
    assert context_length(config) == 64


def test_a_model_without_positions_has_no_limit() -> None:
    assert context_length(BloomConfig()) is None
    assert context_length(XLNetConfig()) is None, "-1 means none"
