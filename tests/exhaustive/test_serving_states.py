"""Heads that read the target's states in the whole product: over Ray, gRPC and HTTP, with heads of random weights.

Random heads are hardly ever right, so what is seen is that states arrive, blocks are drafted, and no token changes.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from serve_app.cli.demo import demo_config
from tests.integration.serving import Reference, demo_served

HIDDEN = 576
HEADS = 9
KV_HEADS = 3
HEAD_DIM = 64
VOCABULARY = 49152
DRAFT_VOCABULARY = 512
PROMPTS = ("List three colours.", "Why is the sky blue?")
ANSWER = 40

Tensors = dict[str, torch.Tensor]


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))) * 0.02


def eagle3() -> tuple[dict[str, Any], Tensors]:
    """One layer over three of the target's states, in SafeAILab's layout."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "hidden_size": HIDDEN,
        "intermediate_size": 256,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "vocab_size": VOCABULARY,
        "draft_vocab_size": DRAFT_VOCABULARY,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000.0,
    }
    layer = "midlayer."
    tensors = {
        "fc.weight": drawn(HIDDEN, 3 * HIDDEN),
        f"{layer}hidden_norm.weight": torch.ones(HIDDEN),
        f"{layer}input_layernorm.weight": torch.ones(HIDDEN),
        f"{layer}post_attention_layernorm.weight": torch.ones(HIDDEN),
        f"{layer}self_attn.q_proj.weight": drawn(HEADS * HEAD_DIM, 2 * HIDDEN),
        f"{layer}self_attn.k_proj.weight": drawn(KV_HEADS * HEAD_DIM, 2 * HIDDEN),
        f"{layer}self_attn.v_proj.weight": drawn(KV_HEADS * HEAD_DIM, 2 * HIDDEN),
        f"{layer}self_attn.o_proj.weight": drawn(HIDDEN, HEADS * HEAD_DIM),
        f"{layer}mlp.gate_proj.weight": drawn(256, HIDDEN),
        f"{layer}mlp.up_proj.weight": drawn(256, HIDDEN),
        f"{layer}mlp.down_proj.weight": drawn(HIDDEN, 256),
        "norm.weight": torch.ones(HIDDEN),
        "lm_head.weight": drawn(DRAFT_VOCABULARY, HIDDEN),
        "d2t": torch.zeros(DRAFT_VOCABULARY, dtype=torch.int64),
    }
    return config, tensors


def medusa() -> tuple[dict[str, Any], Tensors]:
    """Two heads of one residual block each."""
    tensors = {}
    for head in range(2):
        tensors[f"{head}.0.linear.weight"] = drawn(HIDDEN, HIDDEN)
        tensors[f"{head}.0.linear.bias"] = torch.zeros(HIDDEN)
        tensors[f"{head}.1.weight"] = drawn(VOCABULARY, HIDDEN)
    return {"medusa_num_heads": 2, "medusa_num_layers": 1}, tensors


@pytest.mark.parametrize(("method", "make"), [("eagle", eagle3), ("medusa", medusa)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float8"])
def test_states_arrive_and_the_text_stays_the_target_s(tmp_path: Path, method: str, make: Any, dtype: str) -> None:
    config, tensors = make()
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(tensors, tmp_path / "model.safetensors")
    reference = Reference(demo_config().model.target)
    overrides = (
        f"draft={{method: {method}, model: {tmp_path}, states: {{dtype: {dtype}}}, resources: {{num_cpus: 0.5}}}}",
        "speculation.schedule=lock_step",
        "speculation.draft_tokens=2",
    )
    with demo_served(*overrides) as served:
        for prompt in PROMPTS:
            answer = served.client.chat.completions.create(
                model="SmolLM2-135M-Instruct",
                messages=[{"role": "user", "content": prompt}],
                max_tokens=ANSWER,
                temperature=0,
            )
            reference.assert_greedy(prompt, ANSWER, str(answer.choices[0].message.content))
        (target,) = served.inspect("Target")
        (drafter,) = served.inspect("Drafter")
    assert sum(target["states"].values()) > 0, target["states"]
    assert drafter["counts"]["blocks"] > 0, drafter["counts"]
