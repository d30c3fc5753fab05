"""Compares MTP modules in every supported layout with the equations of DeepSeek-V3's report, section 2.2."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from actors.drafters.heads.eagle.mtp import folder_with_mtp, load_mtp
from actors.drafters.registry import capture_spec, create_method, states_needed
from actors.models import checkpoint, weights
from actors.models.checkpoint import INDEX
from cluster.config import DraftPool, validated
from cluster.drafting.method import ReadsStates
from cluster.errors import ConfigError, ModelError
from protos.messages import StateDtype, StatesFormat
from tests.unit.actors.drafters.drafting import a_setup, encoded, wanted_block
from tests.unit.actors.drafters.heads.eagle_fixtures import CPU, Drive, check_steps, off_by
from tests.unit.actors.drafters.heads.mtp_fixtures import (
    BASE,
    EMB,
    EPS,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    KV_HEADS,
    LAYERS,
    LAYOUTS,
    OUT_HEAD,
    SHARED,
    VOCABULARY,
    Tensors,
    deepseek,
    mimo,
    module,
    qwen,
    target_with,
)

TEXT = (5, 17, 3, 3, 60, 41, 9, 88, 2)


class Equations:
    """Equations 21 to 23 at depth 1: h'_i = M [RMSNorm(h_i); RMSNorm(Emb(t_{i+1}))], followed by TRM and OutHead.

    This follows vLLM in two details that the report leaves open. With `hides_first`, the first embedding is zero. The
    state fed for further tokens is TRM's output after OutHead's norm.
    """

    def __init__(self, hides_first: bool) -> None:
        self.t = module()
        self.hides_first = hides_first

    def __call__(self, tokens: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """Returns logits and states for tokens t_1, ... and the states h_0, ... before them."""
        embedded = EMB[tokens]
        if self.hides_first:
            embedded = torch.cat((torch.zeros(1, HIDDEN), embedded[1:]))
        mixed = torch.cat((self.normed(states, "norm of h"), self.normed(embedded, "norm of Emb")), dim=-1)
        normed = self.normed(self.trm(mixed @ self.t["M"].T), "last norm")
        return normed @ OUT_HEAD.T, normed

    def chain(self, text: tuple[int, ...], states: Tensor, count: int) -> tuple[int, ...]:
        tokens = list(text)
        for _ in range(count):
            logits, own = self(torch.tensor(tokens[1:]), states)
            tokens.append(int(logits[-1].argmax()))
            states = torch.cat((states, own[-1:]))
        return tuple(tokens[len(text) :])

    def trm(self, x: Tensor) -> Tensor:
        normed = self.normed(x, "input_layernorm")
        q, k, v = ((normed @ self.t[f"self_attn.{name}_proj"].T).unflatten(-1, (-1, HEAD_DIM)) for name in "qkv")
        q = self.turned(self.normed(q, "self_attn.q_norm"))
        k = self.turned(self.normed(k, "self_attn.k_norm")).repeat_interleave(HEADS // KV_HEADS, dim=1)
        v = v.repeat_interleave(HEADS // KV_HEADS, dim=1)
        scores = torch.einsum("ihd,jhd->hij", q, k) / HEAD_DIM**0.5
        scores = scores.masked_fill(torch.ones(len(x), len(x)).triu(1).bool(), -torch.inf)
        attended = torch.einsum("hij,jhd->ihd", scores.softmax(-1), v).flatten(1)
        x = x + attended @ self.t["self_attn.o_proj"].T
        normed = self.normed(x, "post_attention_layernorm")
        gated = F.silu(normed @ self.t["mlp.gate_proj"].T) * (normed @ self.t["mlp.up_proj"].T)
        return x + gated @ self.t["mlp.down_proj"].T

    def normed(self, x: Tensor, name: str) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * self.t[name]

    def turned(self, x: Tensor) -> Tensor:
        half = HEAD_DIM // 2
        angles = torch.arange(len(x)).unsqueeze(1) * BASE ** (-torch.arange(half) / half)
        cos = angles.cos().unsqueeze(1)
        sin = angles.sin().unsqueeze(1)
        first, second = x.chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def states_of(count: int) -> Tensor:
    return 2 * torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(8))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_it_computes_the_equations(tmp_path: Path, layout: str) -> None:
    """The test feeds a text, and two further tokens with the module's own states."""
    equations = Equations(hides_first=layout != "qwen")
    drive = Drive(load_mtp(target_with(tmp_path, LAYOUTS[layout]()), torch.float32, CPU, range(VOCABULARY)))
    check_steps(drive, equations, torch.tensor((*TEXT[1:], 31, 7)), states_of(len(TEXT) - 1), tolerance=1e-5)


@pytest.mark.parametrize("layout", ["deepseek", "qwen"])
def test_another_first_embedding_would_be_noticed(tmp_path: Path, layout: str) -> None:
    drive = Drive(load_mtp(target_with(tmp_path, LAYOUTS[layout]()), torch.float32, CPU, range(VOCABULARY)))
    tokens = torch.tensor(TEXT[1:])
    logits, _ = Equations(hides_first=layout == "qwen")(tokens, states_of(len(tokens)))
    assert off_by(drive.feed(tokens, states_of(len(tokens)), 0).logits, logits) > 0.01


@pytest.mark.parametrize(
    "draft", [{"method": "mtp"}, {"method": "hybrid", "hybrid": {"then": "mtp"}}], ids=["alone", "after a lookup"]
)
def test_as_a_method_it_drafts_and_drafts_ahead(tmp_path: Path, draft: dict[str, Any]) -> None:
    """The method uses the target's final state, or its own state until that arrives."""
    folder = target_with(tmp_path, deepseek())
    pool = DraftPool.model_validate(draft)
    needs = states_needed(pool, folder)
    assert needs is not None
    assert (needs.layers, needs.width) == ((LAYERS,), HIDDEN)
    setup = a_setup(pool, folder)
    assert setup.states == StatesFormat(HIDDEN, StateDtype.BFLOAT16)
    method: Any = create_method(pool, setup)
    assert isinstance(method, ReadsStates)
    text = (*TEXT[:3], 4, *TEXT[4:])  # without repetitions
    states = states_of(len(text) - 1).bfloat16()
    want = wanted_block(text)
    method.open(replace(want.open, tokens=text))
    method.states("s", 0, encoded(states, method))
    expected = Equations(hides_first=True).chain(text, states.float(), 5)
    (block,) = method.draft([want.request])
    assert block.tokens == expected[:3]
    ahead = want.under(expected[:1], max_tokens=3).ahead
    found = {guess.outcome: guess.tokens for guess in method.draft_ahead([ahead], lambda: False)}
    assert found[expected[:2]] == expected[2:5]


def test_states_have_no_projection_to_go_through(tmp_path: Path) -> None:
    spec = capture_spec(DraftPool(method="mtp"), target_with(tmp_path, qwen()), "float32")
    assert spec is not None
    assert (spec.layers, spec.load_projection) == ((LAYERS,), None)
    with pytest.raises(ConfigError, match="method mtp has no projection"):
        validated({"model": {"target": "t"}, "draft": {"method": "mtp", "states": {"project": "target"}}})


def test_only_files_with_the_module_are_fetched_from_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The repository has a file per tensor, with the same name."""
    whole = target_with(tmp_path, mimo())
    tensors = load_file(whole / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {name: name for name in tensors}}))
    fetched: set[str] = set()

    def download(name: str, allow_patterns: list[str], **_: str) -> str:
        assert name == "org/target"
        for wanted in tensors.keys() & set(allow_patterns):
            save_file({wanted: tensors[wanted]}, tmp_path / wanted)
            fetched.add(wanted)
        return str(tmp_path)

    monkeypatch.setattr(checkpoint, "snapshot_download", download)
    load_mtp(folder_with_mtp("org/target"), torch.float32, CPU, range(VOCABULARY))
    assert fetched == {*mimo(), *SHARED}


def test_only_shared_tensors_of_the_target_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    usual = weights.read_tensors

    def spied(path: Path, names: list[str]) -> Tensors:
        read.extend(names)
        return usual(path, names)

    monkeypatch.setattr("actors.drafters.heads.eagle.mtp.read_tensors", spied)
    monkeypatch.setattr("actors.drafters.heads.files.read_tensors", spied)
    load_mtp(target_with(tmp_path, mimo()), torch.float32, CPU, range(VOCABULARY))
    assert set(read) == {*mimo(), *SHARED}


def added(name: str) -> Tensors:
    return deepseek() | {f"model.layers.{LAYERS}.{name}.weight": torch.zeros(4, 4)}


def gated() -> Tensors:
    return qwen() | {"mtp.layers.0.self_attn.q_proj.weight": torch.zeros(2 * HEADS * HEAD_DIM, HIDDEN)}


@pytest.mark.parametrize(
    ("tensors", "config", "named"),
    [
        ({}, {}, "holds no supported multi-token prediction module"),
        (added("mlp.experts.0.up_proj"), {}, r"decoder layer with mlp\.experts\.0\.up_proj\.weight, expected"),
        (added("self_attn.kv_a_proj_with_mqa"), {}, "latent attention are not supported"),
        (gated(), {}, r"q_proj\.weight in .* has shape \(64, 32\), expected \(32, 32\)"),
        (deepseek(), {"use_sliding_window": True, "sliding_window": 8}, "attends to a window of 8"),
        (deepseek(), {"attention_bias": True}, "has attention_bias, but no tensor"),
    ],
    ids=["none", "experts", "latent attention", "gated attention", "a window", "a bias"],
)
def test_unsupported_modules_are_refused(tmp_path: Path, tensors: Tensors, config: Any, named: str) -> None:
    with pytest.raises(ModelError, match=named):
        load_mtp(target_with(tmp_path, tensors, **config), torch.float32, CPU, range(VOCABULARY))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("norm", ["norm of h", "norm of Emb", "last norm"])
def test_a_module_without_one_of_its_norms_is_refused(tmp_path: Path, layout: str, norm: str) -> None:
    weight = module()[norm]
    tensors = {
        name: t for name, t in LAYOUTS[layout]().items() if t.shape != weight.shape or not torch.equal(t, weight)
    }
    with pytest.raises(ModelError, match=r"lacks the tensor \S*norm\S*; fetch the checkpoint again"):
        load_mtp(target_with(tmp_path, tensors), torch.float32, CPU, range(VOCABULARY))


@pytest.mark.parametrize("absent", ["mtp.fc.weight", "mtp.layers.0.self_attn.q_norm.weight"])
def test_an_absent_shard_of_the_module_is_named(tmp_path: Path, absent: str) -> None:
    tensors = load_file(target_with(tmp_path, qwen()) / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    save_file({name: t for name, t in tensors.items() if name != absent}, tmp_path / "first.safetensors")
    files = {name: "second.safetensors" if name == absent else "first.safetensors" for name in tensors}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": files}))
    with pytest.raises(ModelError, match=r"lacks second\.safetensors, .* fetch these files"):
        load_mtp(tmp_path, torch.float32, CPU, range(VOCABULARY))
