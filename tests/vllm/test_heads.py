"""A head that reads the states of a vLLM target is as right as it is of any target, and changes no text.

Its second model runner alone tells states: `pytest tests/vllm/test_heads.py --second-runner`.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from actors.methods.registry import capture_spec, create_method, state_bounds, states_format
from actors.methods.setup import DraftSetup
from actors.models.checkpoint import vocabulary
from cluster.config import SlipstreamConfig
from cluster.drafting.following import DrafterLimits
from cluster.drafting.method import DraftingMethod
from cluster.drafting.scheduler import DraftScheduler
from cluster.lock_step import lock_step
from cluster.pacing.policy import LockStep
from cluster.routing.session import Generation, Session
from cluster.verification.scheduler import VerificationScheduler
from protos.messages import Acceptance, Sampling
from tests.vllm.cases import config, limits, on_own_engine
from tests.vllm.right_head import right_head
from tests.vllm.scripted import CONTEXT, VOCABULARY, Scripts, request

READ = (0, 1)  # the embeddings, and the output of the first layer
PROMPTS = ([7, 50, 3, 91, 12], [200, 9, 9, 31], [64, 128, 5, 17, 40, 2])
NEW_TOKENS = 30


@pytest.fixture(scope="module")
def texts(tiny_llama: Path) -> list[list[int]]:
    """Greedy, by the own engine without any draft."""
    own = on_own_engine(tiny_llama)
    for index, prompt in enumerate(PROMPTS):
        own.open(request(f"s{index}", Sampling(temperature=0.0), prompt, NEW_TOKENS))
    own.run(Scripts({}).none)
    return [life.prefix.tokens for life in own.lives.values()]


@pytest.fixture(scope="module")
def asked(tiny_llama: Path, texts: list[list[int]], tmp_path_factory: pytest.TempPathFactory) -> SlipstreamConfig:
    head = right_head(tiny_llama, texts, READ, tmp_path_factory.mktemp("heads") / "eagle3")
    return config(tiny_llama, draft={"method": "eagle", "model": str(head)})


@pytest.fixture(scope="module")
def core(is_second_runner: bool, tiny_llama: Path, asked: SlipstreamConfig) -> Iterator[object]:
    if not is_second_runner:
        pytest.skip("--second-runner is not asked for")
    from actors.vllm_engine.vllm_core import start_core

    capture = capture_spec(asked.draft, tiny_llama, "float32")
    started = start_core(asked, str(tiny_llama), VOCABULARY, capture=capture)
    yield started
    started.close()


def method_of(asked: SlipstreamConfig, folder: Path) -> tuple[DraftingMethod, DrafterLimits]:
    """As a drafter makes it."""
    layout = states_format(asked.draft, folder)
    setup = DraftSetup("float32", CONTEXT, asked.speculation.max_draft_tokens, vocabulary(folder), str(folder), layout)
    bounds = DrafterLimits(VOCABULARY, CONTEXT, 8, layout, state_bounds(asked.draft, folder))
    return create_method(asked.draft, setup), bounds


@torch.inference_mode()
def test_in_lock_step_every_draft_of_a_right_head_is_accepted(
    core: object, asked: SlipstreamConfig, tiny_llama: Path, texts: list[list[int]]
) -> None:
    method, bounds = method_of(asked, tiny_llama)
    assert bounds.states is not None
    assert bounds.states.width < len(READ) * 64, "the target projects"
    for index, (prompt, text) in enumerate(zip(PROMPTS, texts, strict=True)):
        target = VerificationScheduler(
            limits(core.memory.pages, core.memory.page_size, bounds.states), LockStep(), memory=core.memory
        )
        drafter = DraftScheduler(bounds, draft_ahead=False)
        generation = Generation(
            session=f"s{index}",
            prompt=tuple(prompt),
            max_len=len(prompt) + NEW_TOKENS,
            stop_ids=(),
            sampling=Sampling(temperature=0.0),
            seed=1,
            draft_seed=1,
            choice=0,
            hash_key=3,
            acceptance=Acceptance.COUPLED,
            max_draft_tokens=1,
        )
        emits = list(lock_step(Session(generation), drafter, method, target, core))
        assert [*prompt, *[token for emit in emits for token in emit.tokens]] == text
        # The first round has no states yet; from then on each block's one token is right.
        assert target.accepted_tokens >= (NEW_TOKENS - 2) // 2
        assert target.wasted_tokens == 0
        core.step(target.plan(1e9))
    assert core.is_idle
