"""Texts of small models of many families equal those of `generate`, whatever is drafted.

The target's scheduler and its engine serve two sessions on few pages: a prompt in chunks, a prefix in shared pages, and
a preemption in every run. A script that knows the right text drafts.
"""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import count
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from actors.engine.executor import StepExecutor
from actors.engine.runner import ModelRunner
from actors.models.recurrent_layers import recurrent_layers
from cluster.envelope import Send
from cluster.verification.step import Outcome, StepPlan
from protos.draft_tree import DraftTree
from protos.messages import DraftRequest, Sampling, Verdict
from protos.prefix import Prefix
from tests.scenarios.verification import ROUTER, Target
from tests.unit.actors.tiny_models import SIZES, VOCABULARY, tokens_of, twins
from tests.unit.cluster.samples import GREEDY, KEY

PAGE_SIZE = 4
PAGES = 17  # one session needs 16, both need 23
STEP_TOKENS = 20
NODES = 8  # of a draft; reaches over a page
NEW_TOKENS = 20
COMMON = tokens_of(1, 22)  # five pages and a half
PROMPTS = {"first": COMMON + tokens_of(2, 21), "second": COMMON + tokens_of(3, 6)}

Tokens = tuple[int, ...]

FOUR_LAYERS = SIZES | {"num_hidden_layers": 4}
NO_SPECIAL_TOKENS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
BY_TURNS = ["sliding_attention", "full_attention"] * 2
WINDOW = {"sliding_window": 7}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_chunk_size": 16}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 16,
    "num_experts_per_tok": 2,
}
LINEAR = {"layer_types": ["linear_attention", "full_attention"] * 2}
DELTA_RULE = LINEAR | {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
FAMILIES: dict[str, tuple[str, Mapping[str, Any]]] = {
    "experts": ("mixtral", SIZES | EXPERTS),
    "many experts": ("qwen3_moe", SIZES | {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}),
    "latent attention": (
        "deepseek_v3",
        SIZES | LATENT | {"n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1},
    ),
    "soft caps": ("gemma2", FOUR_LAYERS | WINDOW | {"layer_types": BY_TURNS, "attn_logit_softcapping": 0.5}),
    "head sizes by layer": (
        "gemma4_text",
        FOUR_LAYERS
        | WINDOW
        | {"layer_types": BY_TURNS, "global_head_dim": 16, "vocab_size_per_layer_input": VOCABULARY},
    ),
    "shared keys": (
        "gemma4_text",
        FOUR_LAYERS
        | WINDOW
        | {"layer_types": BY_TURNS, "num_kv_shared_layers": 2, "vocab_size_per_layer_input": VOCABULARY},
    ),
    "sinks": ("gpt_oss", FOUR_LAYERS | WINDOW | EXPERTS | {"layer_types": BY_TURNS}),
    "chunks and temperature": (
        "llama4_text",
        FOUR_LAYERS
        | {
            "layer_types": ["chunked_attention", "full_attention"] * 2,
            "no_rope_layers": [1, 0] * 2,
            "attention_chunk_size": 7,
            "floor_scale": 7,
            "num_local_experts": 4,
            "intermediate_size_mlp": 48,
        },
    ),
    "gated delta rule": (
        "qwen3_next",
        FOUR_LAYERS | DELTA_RULE | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    ),
    "gated delta rule without experts": ("qwen3_5_text", FOUR_LAYERS | DELTA_RULE),
    "Mamba between attention": (
        "jamba",
        FOUR_LAYERS | {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 4, "mamba_d_state": 8},
    ),
    "Mamba 2 between attention": ("bamba", FOUR_LAYERS | MAMBA | {"attn_layer_indices": [1, 3]}),
    "Mamba 2 beside attention": ("falcon_h1", SIZES | MAMBA | {"mamba_d_ssm": 64}),
    "convolutions": ("lfm2", FOUR_LAYERS | {"layer_types": ["conv", "full_attention"] * 2}),
    "Kimi delta attention": (
        "kimi_linear",
        FOUR_LAYERS | LATENT | LINEAR | {"num_experts": 4, "linear_num_heads": 4, "linear_head_dim": 8},
    ),
    "lightning attention": ("minimax", FOUR_LAYERS | LINEAR | EXPERTS | {"block_size": 16}),
}

Script = Callable[[Tokens], DraftTree]
"""Drafts from the right next tokens, one to NODES."""


def other(token: int, by: int = 1) -> int:
    return (token + by) % VOCABULARY


def chain(right: Tokens, kept: int) -> DraftTree:
    """Returns a chain of which `kept` tokens are right."""
    return DraftTree.chain((*right[:kept], *map(other, right[kept:])))


def tree(right: Tokens, kept: int) -> DraftTree:
    """Returns a tree of sibling pairs, each pair below the second sibling of the previous one.

    The second siblings of `kept` levels are right.
    """
    tokens: list[int] = []
    parents: list[int] = []
    for level, token in enumerate(right[: max(1, len(right) // 2)]):
        parents += [len(tokens) - 1] * 2
        tokens += [other(token), token if level < kept else other(token, 2)]
    return DraftTree(tuple(tokens[: len(right)]), tuple(parents[: len(right)]))


def half(right: Tokens) -> int:
    """Returns a number of right tokens that varies between blocks."""
    return sum(right) % (1 + len(right) // 2)


CHAINS: dict[str, Script] = {
    "right chains": lambda right: chain(right, len(right)),
    "wrong chains": lambda right: chain(right, 0),
    "half-right chains": lambda right: chain(right, half(right)),
}
TREES: dict[str, Script] = {
    "right trees": lambda right: tree(right, len(right)),
    "wrong trees": lambda right: tree(right, 0),
    "half-right trees": lambda right: tree(right, half(right)),
}


@dataclass(frozen=True)
class Family:
    """A model in the engine, with transformers' greedy texts after the prompts."""

    runner: ModelRunner
    texts: dict[str, Tokens]
    is_recurrent: bool  # recurrent layers support no trees

    @property
    def scripts(self) -> dict[str, Script]:
        return CHAINS if self.is_recurrent else CHAINS | TREES


@torch.inference_mode()
def generated(model: PreTrainedModel, prompt: Tokens) -> Tokens:
    text = model.generate(torch.tensor([prompt]), max_new_tokens=NEW_TOKENS, do_sample=False)
    return tuple(text[0, len(prompt) :].tolist())


class ModelTarget(Target):
    """Target whose steps a model computes, for two sessions with a scripted drafter."""

    def __init__(self, family: Family) -> None:
        super().__init__(
            vocabulary=VOCABULARY,
            max_step_tokens=STEP_TOKENS,
            pages=PAGES,
            page_size=PAGE_SIZE,
            trees=not family.is_recurrent,
        )
        self.texts: dict[str, Tokens] = {}
        self.accepted = 0  # draft tokens
        self._executor = StepExecutor(family.runner, VOCABULARY)

    def compute(self, plan: StepPlan) -> list[Outcome]:
        self.rows.append(plan.rows)
        return self._executor.step(plan)

    def serve(self, sampling: Sampling, script: Script | None, right: Mapping[str, Tokens]) -> None:
        """Serves both sessions; starts the second after the first one's first token. `script` requires `right`."""
        waiting = list(PROMPTS)

        def deliver(sends: list[Send]) -> None:
            for receiver, message in sends:
                if receiver == ROUTER:
                    assert isinstance(message, Verdict)
                    self.texts[message.session] = self.texts.get(message.session, ()) + message.tokens
                    self.accepted += message.accepted
                elif script is not None and isinstance(message, DraftRequest):
                    self._draft(message, script, right[message.session])

        while waiting or self.scheduler.admission.has_sessions:
            if waiting and len(self.texts) == len(PROMPTS) - len(waiting):
                name = waiting.pop(0)
                prompt = PROMPTS[name]
                drafts = NODES if script else 0
                self.open(name, tokens=prompt, max_len=len(prompt) + NEW_TOKENS, sampling=sampling, draft_tokens=drafts)
                deliver(self.attach(prompt, name) if script else [])
            deliver(self.step())
        self.finish()

    def _draft(self, request: DraftRequest, script: Script, right: Tokens) -> None:
        """Answers a request; fails if the text before it is wrong."""
        text = PROMPTS[request.session] + right
        before = text[: request.base_len]
        assert request.prefix_hash == Prefix(KEY, before).hash, f"wrong within {request.base_len} tokens: {self.texts}"
        if drafted := text[request.base_len : -1][: request.max_tokens]:
            self.block(before, script(drafted), request.session)


def make_family(name: str) -> Family:
    """Returns the first random model whose texts do not repeat early; repetitive texts would prove little."""
    model_type, fields = FAMILIES[name]
    config = AutoConfig.for_model(model_type, **fields, tie_word_embeddings=False, **NO_SPECIAL_TOKENS)
    for seed in count():
        model, twin = twins(
            lambda: AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=torch.float32), seed=seed
        )
        texts = {name: generated(model, prompt) for name, prompt in PROMPTS.items()}
        if min(len(set(text)) for text in texts.values()) > NEW_TOKENS // 2:
            break
    runner = ModelRunner(twin, PAGES, PAGE_SIZE, is_checked=True)
    return Family(runner, texts, is_recurrent=bool(recurrent_layers(model)))


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> Family:
    return make_family(request.param)


def served(family: Family, sampling: Sampling, script: Script | None, right: Mapping[str, Tokens]) -> ModelTarget:
    """Serves both sessions; asserts that a prefix was shared, a prompt cut and a session preempted."""
    target = ModelTarget(family)
    target.serve(sampling, script, right)
    assert target.scheduler.admission.preempted > 0
    assert target.scheduler.admission.prefix_hits > 2 * PAGE_SIZE
    assert any(not row.decide for rows in target.rows for row in rows), "no prompt was fed in chunks"
    assert any(len(rows) > 1 for rows in target.rows), "no step served two sessions"
    return target


def test_greedy_texts_are_those_of_generate(family):
    assert served(family, GREEDY, None, {}).texts == family.texts
    for name, script in family.scripts.items():
        target = served(family, GREEDY, script, family.texts)
        assert target.texts == family.texts, name
        assert (target.accepted > 0) == ("wrong" not in name)


def test_a_seed_gives_one_text_whatever_is_drafted(family):
    sampling = Sampling(temperature=1.0)
    expected = served(family, sampling, None, {}).texts
    for name, script in family.scripts.items():
        assert served(family, sampling, script, expected).texts == expected, name
