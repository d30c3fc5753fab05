"""The cache and the attention over it, against the same models run plainly by transformers."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from actors.cache import FeedRow
from actors.runner import ModelRunner
from cluster.errors import ModelError

VOCABULARY, WINDOW, CONTEXT = 64, 4, 32
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
LAYERS = ["sliding_attention", "full_attention", "sliding_attention"]
MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES)),  # norms on queries and keys
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SIZES, sliding_window=WINDOW)),
    "gemma3": lambda: Gemma3ForCausalLM(  # windows and full attention by turns, and a scale of its own
        Gemma3TextConfig(**SIZES, sliding_window=WINDOW, layer_types=LAYERS, query_pre_attn_scalar=16)
    ),
}


def tokens_of(seed: int, count: int) -> tuple[int, ...]:
    drawn = torch.randint(VOCABULARY, (count,), generator=torch.Generator().manual_seed(seed))
    return tuple(drawn.tolist())


class Plain:
    """A model as transformers runs it, without any cache, one sequence at a time; and our runner over the same."""

    def __init__(self, make: Callable[[], PreTrainedModel], slots: int = 4) -> None:
        torch.manual_seed(3)
        self._model = make().eval()
        for parameter in self._model.parameters():  # the initial weights are so small that attention hardly shows
            if parameter.ndim > 1:
                torch.nn.init.normal_(parameter, std=0.3)
        self._model.set_attn_implementation("eager")
        torch.manual_seed(3)
        twin = make()
        twin.load_state_dict(self._model.state_dict())
        self.runner = ModelRunner(twin, slots, CONTEXT)

    @torch.inference_mode()
    def logits(self, tokens: tuple[int, ...], last: int) -> Tensor:
        found: Tensor = self._model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
        return found[len(tokens) - last :]


@pytest.fixture(scope="module", params=MODELS)
def plain(request: pytest.FixtureRequest) -> Plain:
    return Plain(MODELS[request.param])


def check(plain: Plain, rows: list[FeedRow], whole: list[tuple[int, ...]]) -> None:
    """The rows' logits are those of plain forwards over the whole sequences."""
    expected = [plain.logits(tokens, row.logits) for row, tokens in zip(rows, whole, strict=True) if row.logits]
    torch.testing.assert_close(plain.runner.forward(rows), torch.cat(expected), atol=1e-4, rtol=1e-4)


def test_mixed_rows_in_one_forward_give_plain_logits(plain):
    """A chunk of a prompt, a block to verify, a single token and a whole prompt, in other slots and depths."""
    a, b, c, d = tokens_of(1, 14), tokens_of(2, 11), tokens_of(3, 9), tokens_of(4, 6)
    check(
        plain,
        [FeedRow(2, a[:5], 0, 0), FeedRow(0, b[:7], 0, 1), FeedRow(3, c[:8], 0, 2)],
        [a[:5], b[:7], c[:8]],
    )
    check(
        plain,
        [FeedRow(2, a[5:9], 5, 0), FeedRow(0, b[7:], 7, 4), FeedRow(3, c[8:], 8, 1), FeedRow(1, d, 0, 6)],
        [a[:9], b, c, d],
    )
    check(plain, [FeedRow(2, a[9:], 9, 5)], [a])


def test_a_rollback_leaves_no_trace(plain):
    """A rejected tail is overwritten or masked; a shorter sequence in a used slot sees nothing of the longer."""
    right, wrong = tokens_of(5, 12), tokens_of(6, 6)
    plain.runner.forward([FeedRow(0, right[:6] + wrong, 0, 1)])
    check(plain, [FeedRow(0, right[6:8], 6, 2)], [right[:8]])
    check(plain, [FeedRow(0, right[8:], 8, 4)], [right])
    other = tokens_of(7, 3)
    check(plain, [FeedRow(0, other, 0, 3)], [other])


def test_single_tokens_beyond_the_window_see_the_window_only(plain):
    """The fast way for single tokens needs no mask, except where a window has slid."""
    tokens = tokens_of(8, 3 * WINDOW)
    plain.runner.forward([FeedRow(1, tokens[:2], 0, 0)])
    for position in range(2, len(tokens)):
        check(plain, [FeedRow(1, (tokens[position],), position, 1)], [tokens[: position + 1]])


def test_the_order_of_rows_changes_nothing(plain):
    a, b = tokens_of(9, 6), tokens_of(10, 9)
    rows = [FeedRow(0, a, 0, 2), FeedRow(1, b, 0, 3)]
    forth, back = plain.runner.forward(rows), plain.runner.forward(rows[::-1])
    torch.testing.assert_close(torch.cat([back[3:], back[:3]]), forth, atol=1e-4, rtol=1e-4)


REFUSED: dict[str, Callable[[], PreTrainedModel]] = {
    "soft caps": lambda: Gemma2ForCausalLM(Gemma2Config(**SIZES)),
    "sinks": lambda: GptOssForCausalLM(GptOssConfig(**SIZES, num_local_experts=2, num_experts_per_tok=1)),
    "chunked layers": lambda: Qwen3ForCausalLM(
        Qwen3Config(**SIZES, layer_types=["chunked_attention", "full_attention", "full_attention"])
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_would_run_wrongly_is_refused(name):
    """Its attention takes arguments that ours does not know: it would run, and give another text than it should."""
    model = REFUSED[name]()
    with pytest.raises(ModelError, match=type(model).__name__):
        ModelRunner(model, 1, CONTEXT)
