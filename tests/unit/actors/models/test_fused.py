"""Fused operations compute what single ones do, and are compiled once for all numbers of tokens."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from actors.attention.batch import exact_batch
from actors.attention.sdpa_gather import SdpaGather
from actors.compute.kv_cache import InputRow, LayerSize, PagedCache
from actors.compute.linear import PlainProjection, TiledProjection
from actors.models.decoder import Decoder, LlamaDecoder
from tests.unit.actors.captures import call_directly
from tests.unit.actors.tiny_models import MODELS, SIZES, tokens_of, twins

CPU = torch.device("cpu")
LLAMA_KIND = ["llama", "qwen2", "qwen3", "mistral"]  # qwen3 norms queries and keys
PAGE_SIZE = 4
TABLES = (tuple(range(30)), tuple(range(59, 29, -1)))
STEPS = ((9, 7), (1, 0), (5, 1), (1, 1), (0, 1), (40, 3), (2, 0), (1, 5))  # tokens of each session


def logits(decoder: Decoder, dtype: torch.dtype = torch.float32) -> Tensor:
    """Returns the logits of all tokens in steps of many sizes."""
    layers = dict.fromkeys(range(SIZES["num_hidden_layers"]), LayerSize(2, 8))
    cache = PagedCache(60, PAGE_SIZE, layers, dtype, CPU)
    cache.layer(0)[: cache.padding_slot] = torch.nan
    parts = []
    done = [0, 0]
    for step in STEPS:
        rows = []
        for session, count in enumerate(step):
            begin, done[session] = done[session], done[session] + count
            tokens = tokens_of(session, 100)[begin : done[session]]
            if tokens:
                rows.append(InputRow(tokens, begin, count, TABLES[session]))
        with torch.inference_mode():
            parts.append(decoder(exact_batch(rows, cache, SdpaGather())).logits)
    return torch.cat(parts)


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("name", LLAMA_KIND)
def test_fused_operations_give_the_same_logits(name):
    model, twin = twins(MODELS[name], seed=5)
    found = logits(LlamaDecoder(model, PlainProjection, compile_function=call_directly))
    torch.testing.assert_close(found, logits(LlamaDecoder(twin)), atol=1e-4, rtol=1e-4)


def test_fused_operations_need_no_padding_for_products_of_fixed_size():
    """With invariant numerics, products on GPUs have padded rows."""

    def product(weight: Tensor, bias: Tensor | None) -> TiledProjection:
        return TiledProjection(PlainProjection(weight, bias), 64, pads=True)

    model, twin = twins(MODELS["llama"], seed=5)
    found = logits(LlamaDecoder(model, product, compile_function=call_directly))
    torch.testing.assert_close(found, logits(LlamaDecoder(twin)), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", LLAMA_KIND)
def test_in_bfloat16_fused_operations_only_round(name):
    model, twin = twins(MODELS[name], seed=5)
    exact = logits(LlamaDecoder(model))
    rounded, again = (twin.to(torch.bfloat16), twins(MODELS[name], seed=5)[1].to(torch.bfloat16))
    fused = logits(LlamaDecoder(rounded, PlainProjection, compile_function=call_directly), torch.bfloat16).float()
    single = logits(LlamaDecoder(again, PlainProjection), torch.bfloat16).float()
    assert (fused - exact).norm() < 1.2 * (single - exact).norm()


class CountedGraphs:
    """Compiler's backend that counts graphs and runs them as traced."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, graph: torch.fx.GraphModule, _: list[Tensor]) -> Callable[..., Any]:
        self.count += 1
        return graph.forward


@pytest.mark.parametrize("name", ["llama", "qwen3"])
@pytest.mark.usefixtures("fresh_compiler")
def test_each_function_is_compiled_for_one_token_and_for_any_more(name):
    """Loading compiles both; a later compilation would delay a step by seconds."""
    model, twin = twins(MODELS[name], seed=5)
    graphs = CountedGraphs()
    decoder = LlamaDecoder(
        model, PlainProjection, compile_function=partial(torch.compile, backend=graphs, fullgraph=True)
    )
    assert graphs.count == 2 * 3
    torch.testing.assert_close(logits(decoder), logits(LlamaDecoder(twin)), atol=1e-4, rtol=1e-4)
    assert graphs.count == 2 * 3


@pytest.mark.parametrize("name", ["llama", "qwen3"])
@pytest.mark.usefixtures("fresh_compiler")
def test_functional_graphs_write_the_cache_in_place(name):
    """The compiler first makes a graph's writes to its inputs functional."""
    model, twin = twins(MODELS[name], seed=5)
    compile_function = partial(torch.compile, backend="aot_eager", fullgraph=True)
    found = logits(LlamaDecoder(model, PlainProjection, compile_function=compile_function))
    torch.testing.assert_close(found, logits(LlamaDecoder(twin)), atol=1e-4, rtol=1e-4)


def without_triton(function: Callable[..., Any]) -> Callable[..., Any]:
    def compiled(*_: Any) -> None:
        raise RuntimeError("cannot find a working Triton installation")

    return compiled


def test_without_a_compiler_single_operations_run_and_the_log_says_why(caplog):
    model, twin = twins(MODELS["llama"], seed=5)
    decoder = LlamaDecoder(model, compile_function=without_triton)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "Triton" in caplog.text
    assert torch.equal(logits(decoder), logits(LlamaDecoder(twin)))
