"""Loads the target: weights (a Hugging Face folder or id, or a GGUF file), tokenizer and chat template."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, PreTrainedModel, PreTrainedTokenizerBase

_USER_TEXT = "\x00user text\x00"


@dataclass(frozen=True)
class TargetSource:
    """Location of the target's weights and tokenizer."""

    model: str
    gguf_file: str | None = None

    def load_tokenizer(self) -> PreTrainedTokenizerBase:
        return AutoTokenizer.from_pretrained(self.model, gguf_file=self.gguf_file)

    def load_model(self, dtype: torch.dtype, attention: str = "sdpa") -> PreTrainedModel:
        """Loads the target in evaluation mode; dequantizes GGUF weights."""
        gguf = {"gguf_file": self.gguf_file, "quantization_config": GgufConfig(dequantize=True)}
        return AutoModelForCausalLM.from_pretrained(
            self.model, dtype=dtype, attn_implementation=attention, **(gguf if self.gguf_file else {})
        ).eval()


@dataclass(frozen=True)
class ChatFrame:
    """Token ids that a chat template puts around a user turn."""

    before_user: tuple[int, ...]
    after_user: tuple[int, ...]  # closes the user's turn and opens the assistant's

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase) -> ChatFrame:
        rendered = tokenizer.apply_chat_template(
            [{"role": "user", "content": _USER_TEXT}], tokenize=False, add_generation_prompt=True
        )
        before, after = str(rendered).split(_USER_TEXT)
        return cls(*(tuple(tokenizer.encode(part, add_special_tokens=False)) for part in (before, after)))

    def prompt(self, tokenizer: PreTrainedTokenizerBase, user_text: str) -> list[int]:
        """Returns the ids of a whole prompt, up to the assistant's first token."""
        user_ids = tokenizer.encode(user_text, add_special_tokens=False)
        return [*self.before_user, *user_ids, *self.after_user]


def end_of_turn_ids(model: PreTrainedModel) -> frozenset[int]:
    """Returns the model's end-of-turn ids."""
    ids = model.generation_config.eos_token_id
    return frozenset(ids if isinstance(ids, list) else [] if ids is None else [ids])
