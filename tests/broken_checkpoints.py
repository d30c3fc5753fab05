"""Invalid checkpoints, each derived from a small valid one, with the expected error messages."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    PreTrainedTokenizerFast,
    T5Config,
)

from tests.byte_tokenizer import byte_tokenizer

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
HEAD = "lm_head.weight"

Edit = Callable[[Path], None]


@dataclass(frozen=True)
class Form:
    """Edit of a valid folder, configuration overrides, and words of the error: reason, then remedy."""

    edit: Edit
    reason: str
    remedy: str
    overrides: tuple[str, ...] = ()
    is_draft: bool = field(default=False)  # the edited folder is the draft's


def good_checkpoint(folder: Path) -> Path:
    """Creates a tiny Llama checkpoint with a tokenizer."""
    torch.manual_seed(0)
    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(folder)
    config = LlamaConfig(**SIZES, vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def config_lines(target: Path, draft: Path | None = None, **server: Any) -> str:
    """Returns a configuration as JSON, which is valid YAML."""
    method: dict[str, Any] = {"method": "draft_model", "model": str(draft)} if draft else {"method": "ngram"}
    return json.dumps({"model": {"target": str(target), "max_context": 128}, "draft": method, "server": server})


def edit_config(**changes: Any) -> Edit:
    """Sets keys of config.json; None removes a key."""

    def edit(folder: Path) -> None:
        path = folder / "config.json"
        content = json.loads(path.read_text()) | changes
        path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))

    return edit


def _no_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def _broken_config(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "llama",')


def _lora(folder: Path) -> None:
    _no_config(folder)
    (folder / WEIGHTS).rename(folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "base_model_name_or_path": "some/base"}')


def _lora_beside(folder: Path) -> None:
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA"}')


def _t5(folder: Path) -> None:
    T5Config().save_pretrained(folder)


def _llava(folder: Path) -> None:
    LlavaConfig().save_pretrained(folder)


def _musicgen(folder: Path) -> None:
    """Configures a MusicGen model; its text encoder and its decoder both look like text models."""
    (folder / "config.json").write_text(
        json.dumps(
            {
                "model_type": "musicgen",
                "text_encoder": {"model_type": "t5"},
                "decoder": {},
                "audio_encoder": {"model_type": "encodec"},
            }
        )
    )


def _gguf(folder: Path) -> None:
    _no_config(folder)
    (folder / WEIGHTS).rename(folder / "model.gguf")


def _pickle(folder: Path) -> None:
    torch.save(load_file(folder / WEIGHTS), folder / "pytorch_model.bin")
    (folder / WEIGHTS).unlink()


def _tensors(change: Callable[[dict[str, torch.Tensor]], Any]) -> Edit:
    def edit(folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS)
        change(tensors)
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})

    return edit


def _truncated(folder: Path) -> None:
    whole = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(whole[: len(whole) // 2])


def _sharded(folder: Path) -> dict[str, str]:
    """Splits the weights into two shards; returns the weight map of the index."""
    tensors = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    names = sorted(tensors)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for part, own in parts.items():
        save_file({name: tensors[name] for name in own}, folder / part, metadata={"format": "pt"})
    shards = {name: part for part, own in parts.items() for name in own}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": shards}))
    return shards


def _missing_shard(folder: Path) -> None:
    _sharded(folder)
    (folder / "b.safetensors").unlink()


def _no_weight_map(folder: Path) -> None:
    _sharded(folder)
    (folder / INDEX).write_text('{"metadata": {}}')


def _lying_index(folder: Path) -> None:
    shards = _sharded(folder)
    shards[HEAD] = "a.safetensors" if shards[HEAD] == "b.safetensors" else "b.safetensors"
    (folder / INDEX).write_text(json.dumps({"weight_map": shards}))


def _without_tokenizer(folder: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()


def _without_decoder(folder: Path) -> None:
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"decoder": None}))


def _other_vocabulary(folder: Path) -> None:
    words = Tokenizer(models.WordLevel({f"word{index}": index for index in range(259)}))
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)


def _few_rows(folder: Path) -> None:
    _without_tokenizer(folder)
    LlamaForCausalLM(LlamaConfig(**SIZES, vocab_size=100)).save_pretrained(folder)


def _learned_positions(folder: Path) -> None:
    shutil.rmtree(folder)
    sizes = {"n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 64}
    GPT2LMHeadModel(GPT2Config(**sizes, vocab_size=259, bos_token_id=1, eos_token_id=2)).save_pretrained(folder)


def _quantized(method: str) -> Edit:
    return edit_config(quantization_config={"quant_method": method, "bits": 4, "group_size": 128})


def _fp8_scales(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.0.mlp.up_proj.weight_scale_inv"] = torch.ones(1, 1)


def _nothing(folder: Path) -> None:
    """Leaves the folder unchanged."""


DESCRIPTIONS = {
    "no config": Form(_no_config, "has no config.json", "save_pretrained()"),
    "broken config": Form(_broken_config, "config.json", "fetch the checkpoint again"),
    "no model_type": Form(edit_config(model_type=None), "no model_type", "add the architecture's"),
    "unknown model_type": Form(edit_config(model_type="lama"), "model_type 'lama'", "correct the name"),
    "remote code": Form(
        edit_config(model_type="own", auto_map={"AutoConfig": "own.Own"}), "Python code of its own", "use a version"
    ),
    "unknown rope_type": Form(
        edit_config(rope_parameters={"rope_type": "spiral", "rope_theta": 1e4}), "rope_type 'spiral'", "expected one of"
    ),
    "adapter": Form(_lora, "a LoRA adapter, not a model", "merge_and_unload()"),
    "adapter beside": Form(_lora_beside, "a LoRA adapter beside a model", "merge_and_unload()"),
    "T5": Form(_t5, "encoder-decoder", "use one of these"),
    "LLaVA": Form(_llava, "multimodal", "use one of these"),
    "GGUF": Form(_gguf, "only GGUF files", "save_pretrained()"),
    "no tokenizer": Form(_without_tokenizer, "has no tokenizer", "copy the tokenizer's files"),
    "no decoder": Form(_without_decoder, "has no decoder", "add the decoder"),
    "context": Form(_nothing, "reads at most 256 tokens", "lower model.max_context", ("model.max_context=512",)),
    "ranks": Form(
        _nothing, "target.tensor_parallel is 3", "set target.tensor_parallel to", ("target.tensor_parallel=3",)
    ),
    "several text models": Form(_musicgen, "no valid musicgen configuration", "correct it"),
    "other vocabulary": Form(
        _other_vocabulary, "cannot be translated", "use a draft with the target's tokenizer", is_draft=True
    ),
    "few rows": Form(_few_rows, "100 vocabulary rows", "set draft.tokenizer", is_draft=True),
    "learned positions": Form(
        _learned_positions, "64 learned positions", "use a draft model with as many positions", is_draft=True
    ),
    "draft without a config": Form(_no_config, "has no config.json", "save_pretrained()", is_draft=True),
}
"""Forms that are known without the weights."""
FILES = {
    "pickle": Form(_pickle, "safetensors", "save_pretrained"),
    "missing tensor": Form(_tensors(lambda tensors: tensors.pop(HEAD)), HEAD, "checkpoint"),
    "surplus tensor": Form(_tensors(_fp8_scales), "weight_scale_inv", "restore the quantization_config"),
    "truncated": Form(_truncated, WEIGHTS, "again"),
    "missing shard": Form(_missing_shard, "b.safetensors is missing", "fetch the file"),
    "no weight_map": Form(_no_weight_map, "weight_map", "again"),
    "lying index": Form(_lying_index, HEAD, "again"),
    "more layers": Form(edit_config(num_hidden_layers=3), "model.layers.2", "checkpoint"),
    "unknown quantization": Form(_quantized("own"), "'own'", "checkpoint"),
    "AWQ": Form(_quantized("awq"), "awq", "checkpoint"),
    "GPTQ": Form(_quantized("gptq"), "gptq", "checkpoint"),
    "draft truncated": Form(_truncated, WEIGHTS, "again", is_draft=True),
}
"""Forms that the files of weights show."""
