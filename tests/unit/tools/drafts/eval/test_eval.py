"""Evaluation of a recorded text gives the same results as lock step, and correct metrics of the offered drafts."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from actors.compute.hidden_states import decode_rows
from actors.drafters.registry import capture_spec, create_method
from cluster.config import DraftPool, ModelConfig, Resources
from cluster.config_sections import StatesOptions
from cluster.errors import ConfigError
from protos.draft_tree import NO_TREE, DraftTree
from tests.broken_checkpoints import SIZES
from tests.toy_tokenizers import sentence_piece
from tests.unit.actors.drafters.heads.eagle_fixtures import CPU, checkpoint
from tests.unit.tools.drafts.eval.tiny_target import a_target
from tools.drafts.evaluation import MeasuredTarget, Replay, draft_prompts, measures, replay, verifies

TOKENS = 40
PROMPTS = ("abcabcabcab", "hello,hello,hel")
LONGEST = 4
NODES = 6
HEADS = {
    "eagle1": "eagle",
    "eagle3": "eagle",
    "medusa": "medusa",
    "mlp_speculator": "mlp_speculator",
    "dflash": "dflash",
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> MeasuredTarget:
    folder = a_target(tmp_path_factory.mktemp("models") / "target")
    model = ModelConfig(target=str(folder), dtype="float32", max_context=128)
    return MeasuredTarget(model, Resources(), 128)


def a_draft(name: str) -> DraftPool:
    if name in HEADS:
        return DraftPool(method=HEADS[name], model=str(checkpoint(name)))  # type: ignore[arg-type]
    options: Any = {name: {"layers": 6} if name == "layer_skip" else {"min_ngram": 1}}
    return DraftPool(method=name, **options)  # type: ignore[arg-type]


# ---------------------------------------------------------------- equality with lock step


@pytest.mark.parametrize("name", ["ngram", "suffix", "layer_skip"])
@pytest.mark.parametrize("draft_tokens", [1, 2, LONGEST])
def test_verifications_equal_those_in_lock_step(name: str, draft_tokens: int, target: MeasuredTarget) -> None:
    draft = a_draft(name)
    setup = target.setup(draft, LONGEST)
    accepted = 0
    for index, prompt in enumerate(PROMPTS):
        generation = target.generation(index, target.prompt(prompt), TOKENS, 0.0, draft_tokens)
        emits = list(target.run(generation, create_method(draft, setup), trees=False))
        text = target.decode(generation)
        assert text.tokens[len(generation.prompt) :] == tuple(token for emit in emits for token in emit.tokens)
        places = replay(create_method(draft, setup), text, LONGEST, NODES)
        assert len(places) == len(text.tokens) - len(generation.prompt)
        assert verifies(places, draft_tokens, trees=False) == len(emits)
        accepted += sum(emit.accepted for emit in emits)
    assert accepted > 0, "a draft that is never right would show nothing"


def test_a_draft_reads_prompts_in_its_own_template(target: MeasuredTarget, tmp_path: Path) -> None:
    tokenizer = sentence_piece(60)
    tokenizer.chat_template = "{% for m in messages %}<mark>{{ m.content }}{% endfor %}<mark>"
    tokenizer.save_pretrained(tmp_path)
    LlamaForCausalLM(LlamaConfig(**SIZES, vocab_size=len(tokenizer))).save_pretrained(tmp_path)
    draft = DraftPool(model=str(tmp_path), prompt="template")
    assert draft_prompts(draft.model_copy(update={"prompt": "text"}), PROMPTS) == [(), ()]
    own = draft_prompts(draft, PROMPTS)
    assert [tokenizer.decode(prompt) for prompt in own] == [f"<mark>{prompt}<mark>" for prompt in PROMPTS]
    setup = target.setup(draft, LONGEST)
    for index, prompt in enumerate(PROMPTS):
        generation = replace(target.generation(index, target.prompt(prompt), 8, 0.0, LONGEST), draft_prompt=own[index])
        emits = list(target.run(generation, create_method(draft, setup), trees=False))
        text = target.decode(generation)
        assert text.tokens[len(generation.prompt) :] == tuple(token for emit in emits for token in emit.tokens)
        drafted = replace(text, open=replace(text.open, draft_prompt=own[index]))
        places = replay(create_method(draft, setup), drafted, LONGEST, NODES)
        assert verifies(places, LONGEST, trees=False) == len(emits)


# ---------------------------------------------------------------- states


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("options", [{}, {"project": "drafter"}, {"keep": False}], ids=str)
@torch.inference_mode()
def test_heads_read_the_targets_states(name: str, options: dict[str, Any], target: MeasuredTarget) -> None:
    """States are projected where a deployment's target projects them."""
    draft = a_draft(name).model_copy(update={"states": StatesOptions(**options)})
    setup = target.setup(draft, LONGEST)
    assert setup.states is not None
    text = target.decode(target.generation(0, target.prompt(PROMPTS[0]), TOKENS, 0.0, LONGEST))
    (states,) = target.states(draft, [text])
    rows = decode_rows(states, setup.states)
    model = AutoModelForCausalLM.from_pretrained(setup.target, dtype=torch.float32)
    hidden = model(torch.tensor([text.tokens[:-1]]), output_hidden_states=True).hidden_states
    known = {"eagle3": (2, 4, 5), "dflash": (2, 4, 6)}.get(name, (8,))
    expected = torch.cat([hidden[layer][0] for layer in known], dim=-1)
    spec = capture_spec(draft, Path(setup.target), "float32")
    project = spec.projection_on(CPU)
    assert (project is not None) == (len(known) > 1 and "project" not in options)
    torch.testing.assert_close(rows, expected if project is None else project(expected), rtol=2**-7, atol=1e-4)


@pytest.mark.parametrize("name", HEADS)
def test_a_head_drafts_wherever_states_exist(name: str, target: MeasuredTarget) -> None:
    draft = a_draft(name)
    method = create_method(draft, target.setup(draft, LONGEST))
    text = target.decode(target.generation(0, target.prompt(PROMPTS[0]), TOKENS, 0.0, NODES))
    (states,) = target.states(draft, [text])
    places = replay(method, type(text)(text.open, text.tokens, states), LONGEST, NODES)
    has_both = [index > 0 and place.room > 0 for index, place in enumerate(places)]
    assert sum(has_both) > TOKENS // 2
    assert [bool(len(place.chain)) for place in places] == has_both
    assert [bool(len(place.tree)) for place in places] == has_both


def test_a_prompt_that_is_too_long_is_refused(target: MeasuredTarget) -> None:
    with pytest.raises(ConfigError, match="prompt 3 has 100 tokens, and 40 are to follow, expected at most 128"):
        target.generation(3, (1,) * 100, TOKENS, 0.0, 1)


@torch.inference_mode()
def test_a_longrope_target_has_the_factors_of_its_longest_session(tmp_path: Path) -> None:
    """transformers uses these factors for a text beyond the original length."""
    folder = a_target(tmp_path / "target")
    factors = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "factor": 8.0, "rope_theta": 10000.0}
    config = json.loads((folder / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "longrope", "original_max_position_embeddings": 8, **factors}
    (folder / "config.json").write_text(json.dumps(config))
    target = MeasuredTarget(ModelConfig(target=str(folder), dtype="float32", max_context=64), Resources(), 64)
    text = target.decode(target.generation(0, target.prompt(PROMPTS[0]), TOKENS, 0.0, LONGEST))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    best = model(torch.tensor([text.tokens[:-1]])).logits[0].argmax(-1).tolist()
    assert text.tokens[text.open.prompt_len :] == tuple(best[text.open.prompt_len - 1 :])


# ---------------------------------------------------------------- metrics


def a_place(next_tokens: tuple[int, ...], chain: tuple[int, ...], tree: DraftTree = NO_TREE, room: int = 9) -> Replay:
    return Replay(room, next_tokens, DraftTree.chain(chain), tree, 0.5, 1.5)


SIBLINGS = DraftTree((7, 1, 2, 9), (-1, -1, 1, -1))  # paths 7, 1 2 and 9


def test_verification_continues_after_accepted_tokens_and_one_more() -> None:
    text = [
        a_place((1, 2, 3, 4), (1, 2, 9), SIBLINGS),
        a_place((2, 3, 4), (5,)),
        a_place((3, 4), (3,)),
        a_place((4,), (4,)),
    ]
    assert verifies(text, 1, trees=False) == 2  # 1 2, then 3 4
    assert verifies(text, 3, trees=False) == 2  # 1 2 3, then 4
    assert verifies(text, 1, trees=True) == 4  # only 7 is offered, and it is wrong
    assert verifies(text, 3, trees=True) == 2  # 1 2 3, then 4


def test_blocks_fit_in_the_remaining_length() -> None:
    text = [a_place((1, 2), (1, 2), room=1), a_place((2,), (2,), room=0)]
    assert verifies(text, 2, trees=False) == 1
    assert verifies([a_place((1, 2), (1, 2), room=0), a_place((2,), (2,), room=0)], 2, trees=False) == 2


def test_measures_cover_the_offered_tokens() -> None:
    texts = [[a_place((1, 2), (7,), SIBLINGS), a_place((2,), ())], [a_place((9, 5), (7,), SIBLINGS)]]
    texts[1].append(a_place((5,), (5,), room=0))
    found = measures("a", "eagle", 0.0, texts, (1,), (1, 2, 4), 64)
    assert (found.positions, found.offered) == (3, 2 / 3)
    assert found.agreement == (0.0, 1 / 3, 2 / 3, 2 / 3)
    assert found.chains == {1: 1.0}
    assert found.trees == {1: 1.0, 2: 4 / 3, 4: 2.0}
    assert (found.token_s, found.tree_s, found.states_bytes) == (0.75, 2.25, 64)
