"""The demo pair's forced tool calls match the tools' schemas, and speculation changes none of them.

The target was not trained on tools, so only the grammar makes it write calls. `SLIPSTREAM_CALLS` sets the number of
answers.
"""

import json
import os
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from transformers import AutoTokenizer

from serve_app.api.chat_template import TemplateOptions
from serve_app.api.grammars import call_grammar
from serve_app.api.request_schemas import ChatRequest
from serve_app.api.text import TextCodec
from serve_app.api.tool_calls import Call, find_template, read_whole
from tests.exhaustive.schemas import PERSON, SCHEMA_PROMPTS, SchemaPrompt, closed, listed, text, whole
from tests.exhaustive.test_structured import CONTEXT, DRAFTED, Pair

ANSWERS = int(os.environ.get("SLIPSTREAM_CALLS", "20"))
TEMPLATE = (
    "{% if tools %}<|im_start|>system\nCall one of these tools: {{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}{% for call in m.tool_calls or [] %}"
    '<tool_call>\n{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n'
    "</tool_call>{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SCHEMAS = {
    "add_person": PERSON,
    "order": closed(items=listed(closed(sku=text(8), n=whole(1, 20)), 1, 2), paid={"type": "boolean"}),
    "weather": closed(1, city=text(), unit={"enum": ["C", "F"]}),
}
TOOLS = [{"type": "function", "function": {"name": n, "parameters": s}} for n, s in SCHEMAS.items()]


def calling_codec(pair: Pair) -> TextCodec:
    tokenizer = AutoTokenizer.from_pretrained(pair.folder)
    tokenizer.chat_template = TEMPLATE
    return TextCodec(tokenizer, pair.codec.eos_ids, find_template("auto", tokenizer, "qwen2"))


def choice(index: int) -> Any:
    names = list(SCHEMAS)
    return "required" if index % 2 else {"type": "function", "function": {"name": names[index // 2 % len(names)]}}


@pytest.mark.timeout(7200)
def test_every_call_is_of_a_tool_by_its_schema(capsys) -> None:
    pair = Pair()
    codec = calling_codec(pair)
    counts: Counter[str] = Counter()
    for index in range(ANSWERS):
        messages = [{"role": "user", "content": SCHEMA_PROMPTS[index % len(SCHEMA_PROMPTS)].prompt}]
        body = {"model": "m", "messages": messages, "tools": TOOLS, "tool_choice": choice(index)}
        grammar = call_grammar(ChatRequest.model_validate(body), codec.call_form, None, lambda: "over")
        prompt = codec.encode_chat(messages, TemplateOptions(tools=TOOLS))
        plain = pair.generation(index, SchemaPrompt("", {"type": "object"}), DRAFTED)
        asked = replace(plain, prompt=prompt, max_len=min(CONTEXT, len(prompt) + 200), grammar=grammar.text)
        session = pair.answer(asked, pair.masked)
        assert pair.answer(asked, pair.unmasked).committed == session.committed
        assert pair.answer(replace(asked, draft_tokens=0), pair.unmasked).committed == session.committed
        counts["accepted"] += session.counts.accepted
        if session.committed[-1] not in codec.eos_ids:
            counts["cut off"] += 1  # a model without tool training may never end its calls
            continue
        said = read_whole(codec.readers.reader(prompt, TOOLS), [codec.decode(session.committed[:-1], False)])
        assert said
        for one in said:
            assert isinstance(one, Call), said
            Draft202012Validator(SCHEMAS[one.name]).validate(json.loads(one.arguments))
        assert index % 2 or len(said) == 1
        counts["calls"] += len(said)
    with capsys.disabled():
        print(f"\n{ANSWERS} answers call: {dict(counts)}")
    assert counts["calls"] >= ANSWERS // 2
    assert counts["accepted"] > 0
