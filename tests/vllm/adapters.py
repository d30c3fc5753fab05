"""Random LoRA adapters of the tiny model, and the texts that unmodified vLLM generates with them."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from tests.vllm.scripted import CONTEXT, VOCABULARY

NEW_TOKENS = 40
RANK = 4
ADAPTERS = ("loud", "quiet")
NAMES = ("", *ADAPTERS)  # the base has no name
PROMPTS = [[(7 * at + 3 * token) % 250 for token in range(70)] for at in range(2)]  # more than two pages of vLLM's
ASKED = {f"{name}-{at}": (name, prompt) for at, prompt in enumerate(PROMPTS) for name in NAMES}


def save_adapter(folder: Path, seed: int) -> str:
    """Writes an adapter of queries and logits, about as strong as the base's own weights; returns its folder."""
    random = torch.Generator().manual_seed(seed)
    modules = {f"model.layers.{layer}.self_attn.q_proj": 128 for layer in range(2)} | {"lm_head": 264}
    weights = {}
    for module, rows in modules.items():
        weights[f"base_model.model.{module}.lora_A.weight"] = torch.randn(RANK, 64, generator=random) * 0.3
        weights[f"base_model.model.{module}.lora_B.weight"] = torch.randn(rows, RANK, generator=random) * 0.5
    save_file(weights, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": ["q_proj", "lm_head"]}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return str(folder)


def texts_of_vllm(base: Path, adapters: dict[str, str]) -> dict[str, list[int]]:
    """Returns greedy texts of unmodified vLLM with their prompts, by session.

    It generates with one adapter at a time, because in a batch with adapters, it applies one to the base too on CPUs.
    """
    from vllm import LLM, SamplingParams
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.lora.request import LoRARequest

    llm = LLM(
        str(base),
        dtype="float32",
        max_model_len=CONTEXT,
        enforce_eager=True,
        enable_lora=True,
        max_loras=2,
        block_size=32,
        kv_cache_memory_bytes=100 << 20,
    )
    params = SamplingParams(
        temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, allowed_token_ids=list(range(VOCABULARY))
    )
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    texts = {}
    for name in NAMES:
        lora = LoRARequest(name, NAMES.index(name), adapters[name]) if name else None
        for at, output in enumerate(llm.generate(prompts, params, use_tqdm=False, lora_request=lora)):
            texts[f"{name}-{at}"] = [*PROMPTS[at], *output.outputs[0].token_ids]
    del llm
    cleanup_dist_env_and_memory()
    return texts
