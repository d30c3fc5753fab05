"""Targets with quantized weights continue prompts as their dequantized weights do, on one rank and on two."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from cluster.errors import ModelError
from serve_app.operations.preflight import check_models
from tests.vllm import avx512_kernels
from tests.vllm.cases import SAMPLINGS, config, on_vllm
from tests.vllm.quantized import ANSWER_TOKENS, FORMATS, PROMPT_TOKENS, texts, write_checkpoint
from tests.vllm.scripted import VOCABULARY, Scripts, request

AMX_KINDS = ("fp8_blocks", "mxfp4")
"""Kinds for which vLLM's CPU build has only kernels that need AMX, or AVX512-BF16 with the plugin."""


@pytest.fixture(scope="module", autouse=True)
def _kernels(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        folder = str(avx512_kernels.write_plugin(tmp_path_factory.mktemp("plugin")))
        patch.syspath_prepend(folder)
        patch.setenv("PYTHONPATH", os.pathsep.join([folder, *sys.path]))  # for the ranks
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


@pytest.fixture(scope="module", params=FORMATS)
def kind(request: pytest.FixtureRequest) -> str:
    kind = str(request.param)
    has_kernel = (
        torch.cuda.is_available() or torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()
    )
    if kind in AMX_KINDS and not has_kernel:
        pytest.skip(f"vLLM's CPU build cannot multiply {kind} weights without AMX or AVX512-BF16")
    return kind


@pytest.fixture(scope="module")
def checkpoint(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(kind, tmp_path_factory.mktemp(kind))


@pytest.mark.parametrize("ranks", [1, 2])
def test_texts_are_those_of_the_dequantized_weights_for_any_blocks(kind: str, checkpoint: Path, ranks: int) -> None:
    from actors.vllm_engine.core import start_core

    configured = config(checkpoint, ranks, dtype="bfloat16")
    assert " by vLLM, " in check_models(configured, with_weights=True)[0]
    whole = texts(kind)
    core = start_core(configured, str(checkpoint), VOCABULARY)
    try:
        for script in ("none", "right", "wrong", "mixed"):
            target = on_vllm(core)
            for session, text in whole.items():
                target.open(request(session, SAMPLINGS["greedy"], text[:PROMPT_TOKENS], ANSWER_TOKENS))
            target.run(getattr(Scripts(whole, seed=3), script))
            assert {session: life.prefix.tokens for session, life in target.lives.items()} == whole, script
            accepted = sum(life.accepted for life in target.lives.values())
            assert (accepted > 0) == (script in ("right", "mixed"))
            assert core.is_idle
    finally:
        core.close()


def test_a_dtype_that_vllm_refuses_for_the_weights_is_named(tmp_path: Path) -> None:
    from actors.vllm_engine.core import start_core

    folder = write_checkpoint("awq", tmp_path)
    with pytest.raises(ModelError, match=r"float32 is not supported for quantization.*; correct model or target\.vllm"):
        start_core(config(folder, dtype="float32"), str(folder), VOCABULARY)
