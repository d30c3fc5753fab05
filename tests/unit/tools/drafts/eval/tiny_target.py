"""Servable folder with the fixtures' target and a tokenizer of 96 tokens."""

import shutil
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.unit.actors.drafters.heads.eagle_fixtures import TARGET

VOCABULARY = 96


def a_target(folder: Path) -> Path:
    """Writes the target; its tokenizer has one token per printable ASCII character except the space."""
    shutil.copytree(TARGET, folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())[:VOCABULARY]
    built = Tokenizer(models.BPE(vocab={symbol: index for index, symbol in enumerate(alphabet)}, merges=[]))
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    built.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=built).save_pretrained(folder)
    return folder
