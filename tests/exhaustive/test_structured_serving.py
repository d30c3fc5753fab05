"""Structured output through the front door: the demo's pair, over HTTP, as OpenAI's client asks for it."""

import json
import re
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from jsonschema import validate

from tests.integration.serving import Served, demo_served

MODEL = "SmolLM2-135M-Instruct"
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 16},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "mood": {"enum": ["good", "bad"]},
    },
    "required": ["name", "age", "mood"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}
ASK: Any = [{"role": "user", "content": "Make up a person. Answer in JSON."}]


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with demo_served("speculation.draft_tokens=4") as served:
        yield served


def chat(served: Served, **fields: Any) -> Any:
    return served.client.chat.completions.create(model=MODEL, messages=ASK, max_tokens=120, **fields)


def test_an_answer_by_a_schema_is_the_same_whole_streamed_and_without_speculation(served: Served) -> None:
    for fields in ({"temperature": 0.0}, {"temperature": 0.9, "seed": 5}):
        plain = chat(served, response_format=FORMAT, extra_body={"speculation": {"draft_tokens": 0}}, **fields)
        whole = chat(served, response_format=FORMAT, **fields)
        text = whole.choices[0].message.content
        validate(json.loads(text), SCHEMA)
        assert whole.choices[0].finish_reason == "stop"
        assert plain.choices[0].message.content == text
        streamed = chat(served, response_format=FORMAT, stream=True, **fields)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed) == text


@pytest.mark.parametrize(
    ("outputs", "pattern"),
    [
        ({"regex": r"[a-c]{3}-\d{2}"}, r"[a-c]{3}-\d{2}"),
        ({"choice": ["positive", "negative"]}, "positive|negative"),
        ({"grammar": 'start: "x" ("y" "z")~2'}, "xyzyz"),
    ],
)
def test_vllms_forms_in_completions(served: Served, outputs: dict[str, Any], pattern: str) -> None:
    extra = {"structured_outputs": outputs}
    answer = served.client.completions.create(model=MODEL, prompt="It is", max_tokens=40, extra_body=extra)
    assert re.fullmatch(pattern, answer.choices[0].text)
    assert answer.choices[0].finish_reason == "stop"


def test_a_schema_that_cannot_be_kept_to_is_refused_by_name(served: Served) -> None:
    bad: Any = {"type": "json_schema", "json_schema": {"name": "p", "schema": {"not": {"type": "string"}}}}
    with pytest.raises(openai.BadRequestError) as caught:
        chat(served, response_format=bad)
    assert caught.value.param == "response_format.json_schema.schema"
