"""vLLM's leading worker stores hidden states at the cache's slots; a fake runner provides them."""

from functools import partial
from types import SimpleNamespace

import torch
from torch import Tensor

from actors.compute.hidden_states import CaptureSpec, StateProjection, decode_rows
from actors.vllm_engine.worker import WorkerStates
from protos.messages import StateDtype, StatesFormat

HIDDEN = 4
LAYERS = 3
LAYER = "model.layers.0.self_attn.attn"
PAGES = 4
PAGE_SIZE = 2


def halves(rows: Tensor) -> Tensor:
    return rows[:, ::2] / 2


def load(projection: StateProjection, device: torch.device) -> StateProjection:
    assert device.type == "cpu"
    return projection


def runner() -> SimpleNamespace:
    text = SimpleNamespace(num_hidden_layers=LAYERS)
    return SimpleNamespace(device=torch.device("cpu"), model_config=SimpleNamespace(hf_text_config=text))


def captured(states: WorkerStates, slots: list[int], final: Tensor, padded: int = 0) -> None:
    """Runs one step with padded tensors, as in vLLM."""
    table = torch.tensor([*slots, *[-1] * padded], dtype=torch.int64)
    states.captured(SimpleNamespace(num_tokens=len(slots)), {LAYER: table}, final, None)


def test_final_states_lie_where_the_cache_has_their_tokens() -> None:
    layout = StatesFormat(HIDDEN, StateDtype.BFLOAT16)
    states = WorkerStates(CaptureSpec((LAYERS,), layout), runner())
    states.keep(LAYER, PAGES, PAGE_SIZE)
    final = torch.arange(16.0).view(4, HIDDEN)
    captured(states, [6, 7, 1], final, padded=1)
    assert torch.equal(decode_rows(states.read([7, 1, 6]), layout), final[[1, 2, 0]])
    captured(states, [7], 100 + final)
    assert torch.equal(decode_rows(states.read([6, 7]), layout), torch.stack([final[0], 100 + final[0]]))


def test_states_are_projected_before_they_are_stored() -> None:
    layout = StatesFormat(HIDDEN // 2, StateDtype.BFLOAT16)
    states = WorkerStates(CaptureSpec((LAYERS,), layout, partial(load, halves)), runner())
    states.keep(LAYER, PAGES, PAGE_SIZE)
    captured(states, [0], torch.tensor([[2.0, 9.0, 4.0, 9.0]]))
    assert decode_rows(states.read([0]), layout).tolist() == [[1.0, 2.0]]
