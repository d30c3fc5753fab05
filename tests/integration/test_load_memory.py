"""Loading holds no more than a layer's weights twice; measured in a process of its own."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma2Config, LlamaConfig, PretrainedConfig

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "load_memory.py"
MOST = 1.15  # of the memory that remains; copying all weights would take 1.5 and more
SIZES = {
    "vocab_size": 1024,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
}
CONFIGS = {"own decoder": LlamaConfig(**SIZES), "transformers' code": Gemma2Config(**SIZES)}


@pytest.fixture(scope="module", params=CONFIGS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a random checkpoint in bfloat16, in several files."""
    config: PretrainedConfig = CONFIGS[request.param]
    path = tmp_path_factory.mktemp("model")
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(path, max_shard_size="50MB")
    return path


@pytest.mark.parametrize(("dtype", "ranks"), [("bfloat16", 1), ("float32", 1), ("float32", 2)])
def test_loading_takes_little_more_than_the_weights(folder: Path, dtype: str, ranks: int) -> None:
    run = subprocess.run(
        [sys.executable, SCRIPT, "--one", folder, dtype, str(ranks)], check=True, capture_output=True, text=True
    )
    found = json.loads(run.stdout.splitlines()[-1])
    assert found["kept_mib"] > 50, found
    assert found["peak_ratio"] < MOST, found
