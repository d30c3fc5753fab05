"""Tests loading a draft folder, with and without optional files, and in 8 bits."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from actors.drafters import products
from actors.drafters.loading import FIGURE, load_draft_model, published_acceptance
from actors.drafters.model.draft_model import DraftModel
from actors.drafters.model.forwards import FILE as FREQUENT_TOKENS
from actors.drafters.model.recurrent_head import FILE as RECURRENT_HEAD
from actors.drafters.registry import DraftSetup
from cluster.config import CacheConfig, DraftPool, LearningOptions
from cluster.config_sections import DraftModelOptions
from cluster.drafting.requests import Proposal
from cluster.errors import ModelError
from protos.messages import Acceptance, Shape
from tests.unit.actors.drafters.drafting import DRAWN, block_of, least_memory, propose, wanted_block

VOCABULARY = 40
HIDDEN = 16
WIDE = 8
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


def a_model(folder: Path, seed: int = 3, **changes: Any) -> Path:
    torch.manual_seed(seed)
    LlamaForCausalLM(LlamaConfig(**SHAPE | changes, initializer_range=0.5)).save_pretrained(folder)
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return a_model(tmp_path)


def load(folder: Path, int8: bool = False, vocabulary: int = VOCABULARY) -> DraftModel:
    options = DraftModelOptions(quantization="int8" if int8 else "none", draft_probs_top_k=4)
    cache = CacheConfig(page_size=4, gib=0.001)
    draft = DraftPool(model=str(folder), cache=cache, max_sessions=2, draft_model=options)
    setup = DraftSetup("float32", 64, 4, {token: str(token) for token in range(vocabulary)}, "")
    return load_draft_model(folder, draft, setup, torch.device("cpu"))


def drafted(method: DraftModel) -> Proposal:
    block = block_of(method, wanted_block((1, 2, 3), 4))
    method.close(["s"])
    return block


def add_head(folder: Path) -> None:
    torch.manual_seed(4)
    weights = {
        "state_norm.weight": torch.ones(HIDDEN),
        "token_norm.weight": torch.ones(HIDDEN),
        "gate_up.weight": torch.randn(2 * WIDE, 2 * HIDDEN),
        "down.weight": torch.randn(HIDDEN, WIDE),
    }
    save_file(weights, folder / RECURRENT_HEAD)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tokens_per_forward": 3}))


@torch.inference_mode()
def test_it_drafts_the_model_s_likeliest_tokens(folder: Path) -> None:
    model = LlamaForCausalLM.from_pretrained(folder)
    tokens = [1, 2, 3]
    for _ in range(4):
        tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    assert drafted(load(folder)).tokens == tuple(tokens[3:])


@pytest.mark.parametrize("with_head", [False, True], ids=["model", "with head"])
def test_in_8_bits_it_drafts_the_same_without_near_ties(folder: Path, with_head: bool) -> None:
    """Large random logits differ by far more than the rounding error."""
    if with_head:
        add_head(folder)
    method = load(folder, int8=True)
    assert method.tokens_per_forward == (3 if with_head else 1)
    assert drafted(method) == drafted(load(folder))


def test_a_draft_that_learns_leaves_room_for_its_next_version(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    setup = DraftSetup("float32", 64, 4, {token: str(token) for token in range(VOCABULARY)}, "")

    def create(learning: LearningOptions | None) -> DraftModel:
        draft = DraftPool(model=str(folder), max_sessions=2, learning=learning)
        return load_draft_model(folder, draft, setup, torch.device("cpu"))

    least = [
        least_memory(monkeypatch, partial(create, learning))
        for learning in (None, LearningOptions(folder=str(folder / "learned")))
    ]
    assert least[1] - least[0] == sum(tensor.nbytes for tensor in load_file(folder / "model.safetensors").values())


def test_only_frequent_tokens_are_proposed(folder: Path) -> None:
    allowed = [7, 21, 5]
    (folder / FREQUENT_TOKENS).write_text(json.dumps(allowed))
    assert set(drafted(load(folder)).tokens) <= set(allowed)


def test_a_recurrent_head_chooses_among_the_most_frequent_tokens(tmp_path: Path) -> None:
    vocabulary = 40_000
    folder = a_model(tmp_path, vocab_size=vocabulary)
    add_head(folder)
    free = drafted(load(folder, vocabulary=vocabulary)).tokens
    others = [token for token in range(vocabulary) if token not in free]
    (folder / FREQUENT_TOKENS).write_text(json.dumps([*others, *free]))
    bound = drafted(load(folder, vocabulary=vocabulary)).tokens
    assert bound[0] == free[0], "the forward's own token may be any"
    assert set(bound[1:3]) <= set(others)


@pytest.mark.parametrize("acceptance", Acceptance)
@pytest.mark.parametrize("shape", Shape)
def test_a_draft_with_learned_positions_drafts_up_to_its_last_one(
    tmp_path: Path, acceptance: Acceptance, shape: Shape
) -> None:
    """The position table has no row for the next position."""
    sizes = {"vocab_size": VOCABULARY, "n_positions": 8, "n_embd": HIDDEN, "n_layer": 1, "n_head": 2}
    GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=1, eos_token_id=2)).save_pretrained(tmp_path)
    method = load(tmp_path)
    found = []
    for length in range(3, 14):
        want = wanted_block(range(1, length + 1), 4, sampling=DRAWN, acceptance=acceptance, shape=shape)
        block = block_of(method, want)
        found.append(len(block.tree.main_path))
        if block.tokens:
            propose(method, [want.under(block.tree)])
    assert found[-5:] == [0] * 5
    if acceptance is Acceptance.REJECTION:
        assert found[:6] == [4, 4, 4, 3, 2, 1]


def test_a_draft_whose_rope_depends_on_the_context_may_have_a_shorter_one_than_the_target(tmp_path: Path) -> None:
    dynamic = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0}
    method = load(a_model(tmp_path, max_position_embeddings=16, rope_parameters=dynamic))
    lengths = [len(block_of(method, wanted_block(range(1, length + 1), 4)).tree.main_path) for length in (3, 8, 13, 20)]
    assert lengths == [4, 4, 4, 0]


def test_eight_bits_are_refused_where_there_are_none(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "can_round", lambda device: False)
    with pytest.raises(ModelError, match="remove the drafting method's quantization"):
        load(folder, int8=True)


# ---------------------------------------------------------------- a checkpoint that replaces another


WEIGHTS = "model.safetensors"


def a_version(folder: Path, **changes: Any) -> Path:
    """Writes another checkpoint, by default of the same shape."""
    return a_model(folder / "0001", seed=5, **changes)


@pytest.mark.parametrize("int8", [False, True], ids=["float32", "int8"])
@pytest.mark.parametrize("with_head", [False, True], ids=["model", "with head"])
def test_a_version_replaces_a_checkpoint_in_the_memory_of_its_cache(folder: Path, with_head: bool, int8: bool) -> None:
    version = a_version(folder)
    if with_head:
        add_head(folder)
        add_head(version)
    method = load(folder, int8=int8)
    before = drafted(method)
    exchange: Any = method.prepare_weights(version)
    assert drafted(method) == before
    earlier = exchange()
    assert drafted(method) == drafted(load(version, int8=int8))
    assert drafted(method) != before
    later = method.exchange(earlier)
    assert drafted(method) == before
    for layer in range(2):
        one, other = (weights.runner.cache.layer(layer) for weights in (earlier, later))
        assert one.data_ptr() == other.data_ptr()


def with_weights(change: Callable[[dict[str, torch.Tensor]], None], name: str = WEIGHTS) -> Callable[[Path], None]:
    def edit(version: Path) -> None:
        weights = load_file(version / name)
        change(weights)
        save_file(weights, version / name, metadata={"format": "pt"})

    return edit


def truncate(name: str) -> Callable[[Path], None]:
    def edit(version: Path) -> None:
        path = version / name
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])

    return edit


BROKEN: dict[str, tuple[Callable[[Path], None], str]] = {
    "NaN": (with_weights(lambda w: w["model.norm.weight"].fill_(torch.nan)), "NaN or infinite weights"),
    "too large": (with_weights(lambda w: w["lm_head.weight"].fill_(3e38)), "computes NaN or infinite logits"),
    "missing tensor": (with_weights(lambda w: w.pop("model.norm.weight")), "missing: model.norm.weight"),
    "truncated": (truncate(WEIGHTS), "cannot read .*model.safetensors"),
    "no weights": (lambda version: (version / WEIGHTS).unlink(), "fetch the whole checkpoint"),
    "no config": (lambda version: (version / "config.json").unlink(), "config.json"),
    "NaN head": (
        with_weights(lambda w: w["down.weight"].fill_(torch.nan), RECURRENT_HEAD),
        "recurrent_head.safetensors holds NaN or infinite weights",
    ),
    "truncated head": (truncate(RECURRENT_HEAD), "cannot read .*recurrent_head.safetensors"),
    "frequent tokens": (
        lambda version: (version / FREQUENT_TOKENS).write_text("[1, 2"),
        "frequent_tokens.json must be a list of token ids",
    ),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_version_is_refused_and_the_method_drafts_on(folder: Path, fault: str) -> None:
    edit, why = BROKEN[fault]
    version = a_version(folder)
    add_head(folder)
    add_head(version)
    edit(version)
    method = load(folder)
    before = drafted(method)
    with pytest.raises(ModelError, match=why):
        method.prepare_weights(version)
    assert drafted(method) == before


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"num_hidden_layers": 3}, "cannot replace the draft in use: its layers need .*layers=3"),
        ({"num_key_value_heads": 2}, "kv_heads=2"),
        ({"vocab_size": VOCABULARY - 1}, "39 vocabulary rows, but the target's ids go up to 39"),
        ({"vocab_size": VOCABULARY + 1}, "41 vocabulary rows, not 40"),
    ],
    ids=lambda each: next(iter(each)) if isinstance(each, dict) else "",
)
def test_a_version_of_another_shape_is_refused(folder: Path, changes: dict[str, int], why: str) -> None:
    version = a_version(folder, **changes)
    method = load(folder)
    with pytest.raises(ModelError, match=why):
        method.prepare_weights(version)


def test_a_version_may_have_other_sizes_that_the_cache_does_not_hold(folder: Path) -> None:
    version = a_version(folder, intermediate_size=32)
    method = load(folder)
    method.prepare_weights(version)()
    assert drafted(method) == drafted(load(version))


# ---------------------------------------------------------------- the published acceptance rate


def published(folder: Path, **config: Any) -> float | None:
    (folder / "config.json").write_text(json.dumps({"vocab_size": 5, **config}))
    return published_acceptance(DraftPool(method="draft_model", model=str(folder)))


def test_published_share_is_read_if_present(tmp_path: Path) -> None:
    assert published(tmp_path, **{FIGURE: 0.6}) == 0.6
    assert published(tmp_path) is None
    assert published_acceptance(DraftPool(method="ngram")) is None


@pytest.mark.parametrize("figure", [0, 1.1, -0.5, "0.6"])
def test_invalid_share_is_refused(tmp_path: Path, figure: object) -> None:
    with pytest.raises(ModelError, match="expected a share above 0 and up to 1; correct it or remove it"):
        published(tmp_path, **{FIGURE: figure})
