"""Compares the reference algorithm with the target's distribution, and the engine with the reference."""

import functools
from itertools import chain
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from actors.drafters.registry import create_method
from actors.speculative_decoding import Decoding, Model, speculative_decode
from cluster.config import DraftPool, ModelConfig, Resources
from protos.messages import Acceptance
from serve_app.cli.demo import demo_config
from tests.lossless.parts import EOS, Setting
from tests.lossless.test_distribution import DRAFTERS, FALSE_ALARM, TARGET, p_value
from tests.lossless.world import calm
from tools.drafts.evaluation import MeasuredTarget

SEQUENCES = 1000
NEW_TOKENS = 3
PROMPT = "Write one sentence about the sea."


def table(logits: Tensor) -> Model:
    """Returns a model whose next token depends only on the last token."""
    return lambda tokens: logits[tokens]


def text(draft: Tensor, options: Decoding, target: Tensor = TARGET) -> tuple[int, ...]:
    return tuple(chain.from_iterable(speculative_decode(table(target), table(draft), [1], options)))


@pytest.mark.parametrize("draft", DRAFTERS)
def test_rejection_sampling_follows_the_targets_distribution(draft: str) -> None:
    """Chi-square test over all three-token continuations, with a false-alarm rate of 1e-5."""
    samples = []
    for seed in range(SEQUENCES):
        options = Decoding(NEW_TOKENS, 2, Acceptance.REJECTION, 1.0, seed, seed + SEQUENCES, (EOS,))
        samples.append(text(DRAFTERS[draft], options))
    assert p_value(Setting(TARGET, DRAFTERS[draft], Acceptance.REJECTION, calm), samples) > FALSE_ALARM


@pytest.mark.parametrize("draft", DRAFTERS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_under_gumbel_coupling_the_text_does_not_depend_on_the_draft(draft: str, temperature: float) -> None:
    for seed in range(100):
        alone = text(TARGET, Decoding(8, 0, temperature=temperature, seed=seed))
        assert text(DRAFTERS[draft], Decoding(8, 3, temperature=temperature, seed=seed)) == alone


def test_a_draft_equal_to_the_target_is_always_accepted() -> None:
    for rule in Acceptance:
        rounds = list(speculative_decode(table(TARGET), table(TARGET), [1], Decoding(8, 3, rule, seed=5)))
        assert [len(committed) for committed in rounds] == [4, 4]


def test_nothing_follows_a_stop_token() -> None:
    always_eos = torch.zeros_like(TARGET)
    always_eos[:, EOS] = 9.0
    assert text(always_eos, Decoding(8, 3, temperature=0.0, stop_ids=(EOS,)), target=always_eos) == (EOS,)


# ---------------------------------------------------------------- the engine, with the demo pair


@functools.cache
def transformers_model(folder: Path) -> Model:
    """Returns a model that runs transformers' forward pass over the whole text on each call."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    @torch.inference_mode()
    def logits(tokens: list[int]) -> Tensor:
        found: Tensor = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
        return found

    return logits


def folders() -> tuple[Path, Path]:
    """Returns the folders of the demo's target and draft."""
    config = demo_config()
    assert config.draft.model is not None, "the demo has a draft model"
    return Path(config.model.target).expanduser(), Path(config.draft.model).expanduser()


@functools.cache
def engine() -> MeasuredTarget:
    return MeasuredTarget(ModelConfig(target=str(folders()[0]), dtype="float32"), Resources(), context=128)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_the_engine_commits_what_the_reference_commits(temperature: float) -> None:
    draft = DraftPool(method="draft_model", model=str(folders()[1]))
    method = create_method(draft, engine().setup(draft, 4))
    models = [transformers_model(folder) for folder in folders()]
    generation = engine().generation(0, engine().prompt(PROMPT), 12, temperature, 4)
    emitted = list(engine().run(generation, method, trees=False))
    options = Decoding(12, 4, temperature=temperature, seed=generation.seed, stop_ids=generation.stop_ids)
    rounds = list(speculative_decode(models[0], models[1], generation.prompt, options))
    assert [token for emit in emitted for token in emit.tokens] == list(chain.from_iterable(rounds))
    assert any(len(committed) > 1 for committed in rounds), "drafts were accepted"
