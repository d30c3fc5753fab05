"""Compares each variation of published EAGLE heads with a plain torch implementation."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from actors.compute.kv_cache import InputRow
from actors.drafters.heads.eagle.config import (
    NO_OVERRIDES,
    EagleConfig,
    EagleOverrides,
    FeatureNorm,
    OutputNorm,
    WeightSource,
)
from actors.drafters.heads.eagle.loading import EagleRunner
from actors.drafters.heads.eagle.method import eagle_draft_model
from actors.drafters.model.sampling import DraftingLimits
from actors.models.decoder import ForwardOutput
from tests.unit.actors.drafters.drafting import block_of, propose, wanted_block
from tests.unit.actors.drafters.heads.eagle_fixtures import TOLERANCE, Drive, check_steps, loaded, off_by
from tests.unit.actors.drafters.heads.eagle_restated import RestatedEagle, Variant

LENGTH = 9
IDS = "eagle_aux_hidden_state_layer_ids"
VARIANTS = {
    "eagle3": Variant(),
    "norm_before_residual": Variant(norm_before_residual=True),
    "norm_output": Variant(norm_output=True),
    "norm_before_fc": Variant(feature_norm="input_norm", config={"norm_before_fc": True}),
    "norm_before_fc in eagle_config": Variant(
        feature_norm="input_norm", config={"eagle_config": {"norm_before_fc": True}}
    ),
    "fc_norm": Variant(feature_norm="fc_norm", config={"fc_norm": True}),
    "fc_norm by its legacy names": Variant(feature_norm="legacy", config={"use_aux_norm": True}),
    "fc_norm that is not configured": Variant(feature_norm="fc_norm"),
    "all that EAGLE 3.1 has": Variant(feature_norm="fc_norm", norm_before_residual=True, norm_output=True),
    "draft vocabulary": Variant(columns=40),
    "draft_vocab_size null": Variant(config={"draft_vocab_size": None}),
    "the target's embedding": Variant(own_embedding=False, columns=40),
    "the target's head": Variant(own_head=False),
    "tied": Variant(own_head=False, tied=True),
    "tied with the target's embedding": Variant(own_head=False, tied=True, own_embedding=False),
    "several layers": Variant(layers=3),
    "q_norm and k_norm": Variant(head_norms=True),
    "fc bias": Variant(fc_bias=True, config={"bias": True}),
    "attention_bias": Variant(attention_bias=True, config={"attention_bias": True}),
    "another head_dim": Variant(head_dim=16, heads=6, kv_heads=3),
    "as many key-value heads": Variant(kv_heads=4),
    "two states": Variant(aux=2, config={IDS: [1, 5]}),
    "the final state alone": Variant(aux=0, state_norm=False, config={"eagle_config": {"use_aux_hidden_state": False}}),
    "the final state alone, normed": Variant(aux=0),
    "no last norm": Variant(last_norm=False, config={"eagle_config": {"use_last_layernorm": False}}),
    "a hidden size of its own": Variant(hidden=48, config={"target_hidden_size": 32}),
    "SafeAILab's names": Variant(prefix="midlayer."),
    "vLLM's names": Variant(prefix="model.layers.0."),
    "rope_theta": Variant(base=500.0),
    "rope_parameters before rope_theta": Variant(
        base=500.0, config={"rope_theta": 10000.0, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}
    ),
    "rope_scaling": Variant(base=500.0, factor=4.0, config={"rope_scaling": {"type": "linear", "factor": 4.0}}),
    "rope_parameters that agree with rope_scaling": Variant(
        base=500.0,
        factor=4.0,
        config={
            "rope_theta": 10000.0,
            "rope_parameters": {"rope_theta": 500.0, "rope_type": "linear", "factor": 4.0},
            "rope_scaling": {"type": "linear", "factor": 4.0},
        },
    ),
    "rope_parameters by layer type": Variant(
        base=500.0,
        config={
            "rope_theta": None,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
                "full_attention": {"rope_type": "default", "rope_theta": 500.0},
            },
        },
    ),
    "rope_scaling null": Variant(base=500.0, config={"rope_scaling": None, "rope_parameters": None}),
    "mrope of text": Variant(config={"rope_scaling": {"type": "mrope", "mrope_section": [2, 1, 1]}}),
    "eagle1": Variant(eagle3=False, own_head=False),
    "eagle1 with fc bias": Variant(eagle3=False, own_head=False, fc_bias=True),
    "eagle1 with the target's embedding": Variant(eagle3=False, own_head=False, own_embedding=False),
    "eagle1 of several layers": Variant(eagle3=False, own_head=False, layers=2),
    "eagle1 with a head of its own": Variant(eagle3=False),
    "HASS with its norms": Variant(eagle3=False, own_head=False, fc_bias=True, hass=True),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_variant_of_published_heads(tmp_path: Path, variant: str) -> None:
    """The test feeds a prompt, and two further steps with the head's own states."""
    restated = RestatedEagle(VARIANTS[variant])
    head = loaded(restated.save(tmp_path))
    drive = Drive(head)
    drawn = torch.Generator().manual_seed(2)
    tokens = torch.randint(96, (LENGTH + 2,), generator=drawn)
    raw = 2 * torch.randn(LENGTH, head.config.needs.width, generator=drawn)
    states = restated.project(raw)
    assert off_by(drive.head.inputs(raw), states) < TOLERANCE
    check_steps(drive, restated, tokens, states)
    assert head.token_ids.tolist() == restated.token_ids.tolist()


@pytest.mark.parametrize("mask_shape", [(1, 96), (1, 1, 96)])
@pytest.mark.parametrize("key", ["mask_token_id", "pard_token", "ptd_token_id"])
def test_a_head_that_predicts_several_tokens_in_one_forward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, mask_shape: tuple[int, ...]
) -> None:
    """P-EAGLE appends mask tokens with the projected mask_hidden to the text, one per predicted token."""
    fed: list[list[tuple[int, ...]]] = []  # by forward and row
    forward = EagleRunner.forward

    def counted(runner: EagleRunner, rows: Sequence[InputRow], *others: Any) -> ForwardOutput:
        fed.append([row.tokens for row in rows])
        return forward(runner, rows, *others)

    monkeypatch.setattr(EagleRunner, "forward", counted)
    variant = Variant(mask_shape=mask_shape, layers=2, feature_norm="fc_norm", config={key: 90})
    restated = RestatedEagle(variant)
    head = loaded(restated.save(tmp_path))
    method = eagle_draft_model(head, 16, 4, DraftingLimits(top_k=8), 3, lambda: 0.0)
    assert method.tokens_per_forward == 3
    text = tuple(range(3, 3 + LENGTH + 4))
    raw = 2 * torch.randn(len(text) - 1, head.config.needs.width, generator=torch.Generator().manual_seed(2))
    for length in (LENGTH, LENGTH + 4):  # the second round ignores cached masks
        tokens = text[:length]
        mask = restated.project(restated.tensors["mask_hidden"].reshape(1, -1))
        states = torch.cat([restated.project(raw[: length - 1]), mask, mask])
        logits, _ = restated(torch.tensor([*tokens[1:], 90, 90]), states)
        want = wanted_block(tokens)
        method.open(replace(want.open, tokens=tokens))
        method.states("s", 0, raw[: length - 1])
        fed.clear()
        block = block_of(method, want)
        assert block.tokens == tuple(logits[-3:].argmax(-1).tolist())
        assert len(fed) == 1, "all three tokens are of one forward"
        assert fed[0][0][-2:] == (90, 90)
        propose(method, [want.under(block.tree, max_tokens=3)])
    states = torch.cat([states[:-2], restated(torch.tensor(tokens[1:]), states[:-2])[1][-1:], mask, mask])
    late = want.after(50)  # late state: feeds the last place's prediction, not the masks'
    block = block_of(method, late)
    logits, _ = restated(torch.tensor([*late.tokens[1:], 90, 90]), states)
    assert block.tokens == tuple(logits[-3:].argmax(-1).tolist())


def config_of(folder: Path, variant: Variant) -> EagleConfig:
    return loaded(RestatedEagle(variant).save(folder)).config


@pytest.mark.parametrize(
    ("kind", "is_normed"), [(None, False), ("eagle3", True), ("peagle", False)], ids=["raw", "eagle3", "peagle"]
)
def test_the_file_type_determines_an_unconfigured_residual(tmp_path: Path, kind: str | None, is_normed: bool) -> None:
    changes = {"norm_before_residual": None} | ({"speculators_model_type": kind} if kind else {})
    assert config_of(tmp_path, Variant(config=changes)).norm_before_residual is is_normed


LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
ORIGINAL = {"original_max_position_embeddings": 64}


def logits_of(folder: Path, config: dict[str, Any], overrides: EagleOverrides = NO_OVERRIDES) -> Tensor:
    head = loaded(RestatedEagle(Variant(config=config)).save(folder), overrides)
    return Drive(head).feed(torch.arange(LENGTH), torch.ones(LENGTH, 32), 0).logits


def test_the_override_of_positions_does_not_change_the_rope(tmp_path: Path) -> None:
    config = {"rope_scaling": LONGROPE | ORIGINAL, "max_position_embeddings": 4096}
    usual = logits_of(tmp_path, config)
    assert torch.equal(logits_of(tmp_path, config, EagleOverrides(max_positions=128)), usual)
    assert off_by(logits_of(tmp_path, config | {"max_position_embeddings": 128}), usual) > TOLERANCE


def test_an_original_length_beside_the_section_is_read(tmp_path: Path) -> None:
    usual = logits_of(tmp_path, {"rope_scaling": LONGROPE | ORIGINAL})
    assert torch.equal(logits_of(tmp_path, {"rope_scaling": LONGROPE} | ORIGINAL), usual)
    assert off_by(logits_of(tmp_path, {"rope_scaling": LONGROPE | {"original_max_position_embeddings": 8}}), usual) > 0


def test_a_lone_hass_norm_is_dropped(tmp_path: Path) -> None:
    restated = RestatedEagle(Variant(eagle3=False, own_head=False))
    restated.save(tmp_path)
    expected = loaded(tmp_path)
    stray = {"hidden_layernorm.weight": torch.zeros(32)}
    save_file(load_file(tmp_path / "model.safetensors") | stray, tmp_path / "model.safetensors")
    found = loaded(tmp_path)
    tokens = torch.arange(5)
    states = torch.ones(5, 32)
    assert torch.equal(Drive(found).feed(tokens, states, 0).logits, Drive(expected).feed(tokens, states, 0).logits)


def test_a_head_describes_how_it_was_understood(tmp_path: Path) -> None:
    config = config_of(tmp_path, Variant(columns=40, feature_norm="fc_norm", own_embedding=False, norm_output=True))
    assert (config.feature_norm, config.output_norm) == (FeatureNorm.EACH, OutputNorm.BOTH)
    assert (config.embedding, config.lm_head) == (WeightSource.TARGET, WeightSource.HEAD)
    assert config.describe() == [
        "EAGLE-3 head: 1 layer(s) of 32, MLP 40, 4 heads, 2 key-value heads of 8, eps 1e-05",
        "reads the target's states [2, 4, 5] (k: after k layers), 96 elements",
        "positions up to 512, RoPE base 10000, default",
        "proposes 40 of 96 tokens",
        "embedding of the target, LM head of the head",
        "norm after the last layer: logits and recycled states",
        "norm before fc: each state by itself; states enter the residual unchanged",
        "the states are a default, not in the head's configuration; set draft.eagle.states if acceptance is low",
    ]
