"""Hidden states in vLLM's pages belong to the text, for any blocks and after any preemption.

Only vLLM's second model runner exposes states: `TRITON_INTERPRET=1 pytest tests/vllm/test_states.py`.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from actors.compute.hidden_states import CaptureSpec, decode_rows
from cluster.errors import ModelError
from cluster.verification.step import StateRead
from protos.messages import Sampling, StateDtype, StatesFormat
from tests.vllm.cases import config, on_own_engine, on_vllm
from tests.vllm.scripted import LONGEST, VOCABULARY, ScriptedTarget, Scripts, request
from tests.vllm.second_runner import IS_ASKED_FOR

LAYERS = (0, 1, 2)  # embeddings, output of the first layer, and output of the last norm
HIDDEN = 64
SPEC = CaptureSpec(LAYERS, StatesFormat(len(LAYERS) * HIDDEN, StateDtype.BFLOAT16))
SHARED = [int(token) for token in torch.randint(3, 250, (70,), generator=torch.Generator().manual_seed(3))]
PROMPTS = {
    "long-0": SHARED,
    "long-1": [*SHARED[:66], 9, 8, 7],
    "short-0": [12, 200, 31],
    "short-1": [77, 5, 5, 120, 43],
    "long-2": [*SHARED, 11, 22],
}
NEW_TOKENS = 40  # long texts need two pages besides two shared ones, short texts two: more than available
ROUNDED = 2.0**-7  # bfloat16 rounding, with a margin for the order of sums


@pytest.fixture(scope="module")
def core(tiny_llama: Path) -> Iterator[object]:
    """Starts a core with few pages, so sessions are preempted."""
    if not IS_ASKED_FOR:
        pytest.skip("the second runner is not asked for")
    from actors.vllm_engine.core import start_core

    started = start_core(config(tiny_llama, num_gpu_blocks_override=11), str(tiny_llama), VOCABULARY, capture=SPEC)
    yield started
    started.close()


@pytest.fixture(scope="module")
def whole(tiny_llama: Path) -> dict[str, list[int]]:
    """Returns the texts of Slipstream's own engine without drafts."""
    own = on_own_engine(tiny_llama)
    _open_all(own)
    own.run(Scripts({}).none)
    return {session: life.prefix.tokens for session, life in own.lives.items()}


@pytest.fixture(scope="module")
def states(tiny_llama: Path, whole: dict[str, list[int]]) -> dict[str, Tensor]:
    """Returns transformers' states, (tokens, layers x hidden), of each text."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32).eval()
    found = {}
    with torch.inference_mode():
        for session, text in whole.items():
            streams = model.model(input_ids=torch.tensor([text]), output_hidden_states=True).hidden_states
            found[session] = torch.cat([streams[layer][0] for layer in LAYERS], dim=-1)
    return found


def _open_all(target: ScriptedTarget) -> None:
    for session, prompt in PROMPTS.items():
        target.open(request(session, Sampling(temperature=0.0), prompt, NEW_TOKENS))


@pytest.mark.parametrize("kind", ["none", "mixed"])
def test_cached_pages_match_the_text(
    core: object, whole: dict[str, list[int]], states: dict[str, Tensor], kind: str
) -> None:
    target = on_vllm(core)
    _open_all(target)
    seen = dict.fromkeys(PROMPTS, 0)
    preempted = 0

    def each_step(step: int) -> None:
        nonlocal preempted
        preempted += core.preempted
        for session, life in target.lives.items():
            held = 0 if life.is_over else core.memory.held(session, life.prefix.length)
            rows = decode_rows(core.read(StateRead(session, 0, tuple(range(held)))), SPEC.format) if held else None
            if rows is not None:
                torch.testing.assert_close(rows, states[session][:held], rtol=ROUNDED, atol=ROUNDED)
            seen[session] = max(seen[session], held)

    target.run(getattr(Scripts(whole, seed=2), kind), each_step)
    assert {session: life.prefix.tokens for session, life in target.lives.items()} == whole
    assert all(held >= len(PROMPTS[session]) + NEW_TOKENS - 1 - LONGEST for session, held in seen.items())
    assert preempted, "no session lost its pages, so nothing was shown"
    assert core.is_idle


@pytest.mark.skipif(IS_ASKED_FOR, reason="this is the second one")
def test_the_first_runner_is_refused_for_lack_of_states(tiny_llama: Path) -> None:
    from actors.vllm_engine.core import start_core

    with pytest.raises(ModelError, match="first model runner does not report"):
        start_core(config(tiny_llama), str(tiny_llama), VOCABULARY, capture=SPEC)
