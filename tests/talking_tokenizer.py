"""Small tokenizer of a model with reasoning and tool calls, based on the byte tokenizer."""

from typing import Any

from tokenizers import AddedToken

from tests.byte_tokenizer import byte_tokenizer

TALKING_TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if enable_thinking %}<think>\n{% endif %}{% endif %}"
)
MODEL_TYPE = "qwen3"  # has the same answer format


def talking_tokenizer() -> Any:
    """Returns a tokenizer like Qwen's: control tokens are special; markers of reasoning and tool calls are not."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TALKING_TEMPLATE
    tokenizer.add_tokens([AddedToken("<|im_start|>", special=True), AddedToken("<|im_end|>", special=True)])
    marks = ("<think>", "</think>", "<tool_call>", "</tool_call>")
    tokenizer.add_tokens([AddedToken(mark, special=False) for mark in marks])
    tokenizer.eos_token = "<|im_end|>"
    return tokenizer
