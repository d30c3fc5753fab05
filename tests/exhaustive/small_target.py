"""Target with the demo's tokenizer and tiny random weights, for tests of serving rather than of text."""

import shutil
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
NAMES = ("chat_template.jinja", "tokenizer.json", "tokenizer_config.json", "generation_config.json")
SPREAD = 0.3  # of weights; with the default initialization, logits would nearly tie


def make_small_target(folder: Path, demo: Path) -> str:
    """Writes the target into `folder`; returns its path."""
    config = AutoConfig.from_pretrained(demo)
    config.update(SIZES)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=SPREAD)
    model.save_pretrained(folder)
    copy_tokenizer(demo, folder)
    return str(folder)


def copy_tokenizer(demo: Path, folder: Path) -> None:
    """Copies the tokenizer, its chat template and the EOS ids."""
    for name in NAMES:
        shutil.copy(demo / name, folder / name)
