"""Tests OpenAI's client with the served demo pair: concurrent JSON-schema answers, and tool calls with their results.

The demo's target gets a chat template with tools. It was not trained on tools, so only the grammar makes it write
calls. `SLIPSTREAM_JSON_ANSWERS` sets the number of answers.
"""

import asyncio
import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from jsonschema import Draft202012Validator, ValidationError
from openai.types.chat import ChatCompletion
from transformers import AutoTokenizer
from transformers.cli.serving.utils import get_response_template

from serve_app.cli.demo import demo_config
from tests.exhaustive.schemas import SCHEMA_PROMPTS
from tests.exhaustive.test_tool_calls import SCHEMAS, TEMPLATE, TOOLS
from tests.integration.serving import Served, demo_served
from tests.integration.test_serving import assert_nothing_left

MODEL = "SmolLM2-135M-Instruct"
ANSWERS = int(os.environ.get("SLIPSTREAM_JSON_ANSWERS", "60"))
AT_ONCE = 8
MAX_TOKENS = 400  # per answer; truncated answers do not count
TEMPERATURES = (0.0, 0.7, 1.0)
ROUND_TRIPS = 6
ANSWER_TOKENS = 48  # per answer to a tool result


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = calling_target(Path(demo_config().model.target), tmp_path_factory.mktemp("target"))
    settings = (
        f"model.target={folder}",
        f"model.served_name={MODEL}",
        f"server.response_template={json.dumps(response_template(folder))}",
        "speculation.schedule=lock_step",
        "speculation.draft_tokens=6",
        "draft.resources.background=false",
    )
    with demo_served(*settings) as served:
        yield served
        assert_nothing_left(served)


def calling_target(demo: Path, folder: Path) -> Path:
    """Creates the demo's target with another chat template."""
    for file in demo.resolve().iterdir():
        (folder / file.name).symlink_to(file)
    template = folder / "chat_template.jinja"
    template.unlink(missing_ok=True)
    template.write_text(TEMPLATE)
    return folder


def response_template(folder: Path) -> dict[str, Any]:
    """Returns the template's answer format: Qwen's without reasoning, which the model would never end."""
    model = SimpleNamespace(config=SimpleNamespace(model_type="qwen2"))
    template = dict(get_response_template(AutoTokenizer.from_pretrained(folder), model))
    fields = {name: field for name, field in template["fields"].items() if name != "reasoning_content"}
    return template | {"fields": fields}


@pytest.mark.timeout(7200)
async def test_every_answer_validates_against_its_schema(served: Served, capsys: Any) -> None:
    places = asyncio.Semaphore(AT_ONCE)

    async def one(index: int) -> ChatCompletion:
        asked = SCHEMA_PROMPTS[index % len(SCHEMA_PROMPTS)]
        form: Any = {"type": "json_schema", "json_schema": {"name": "answer", "schema": asked.schema, "strict": True}}
        async with places:
            return await client.chat.completions.create(
                model=MODEL,
                messages=[{"role": "user", "content": f"{asked.prompt} Answer in JSON."}],
                response_format=form,
                max_tokens=MAX_TOKENS,
                temperature=TEMPERATURES[index % len(TEMPERATURES)],
                seed=index,
            )

    async with served.async_client as client:
        answers = await asyncio.gather(*(one(index) for index in range(ANSWERS)))
    faults = {index: fault for index, answer in enumerate(answers) if (fault := fault_of(index, answer))}
    drafted = sum((drafts(answer) for answer in answers), Counter[str]())
    with capsys.disabled():
        rate = drafted["accepted"] / max(1, drafted["drafted"])
        print(f"\n{len(answers) - len(faults)} of {ANSWERS} answers validate; {dict(drafted)}, {rate:.3f} accepted")
    assert not faults
    assert drafted["accepted"] > 0


def fault_of(index: int, answer: ChatCompletion) -> str | None:
    """Returns the reason why an answer does not match its schema, or None."""
    (choice,) = answer.choices
    if choice.finish_reason != "stop":
        return f"it ended by {choice.finish_reason}: {choice.message.content!r}"
    try:
        Draft202012Validator(SCHEMA_PROMPTS[index % len(SCHEMA_PROMPTS)].schema).validate(
            json.loads(choice.message.content or "")
        )
    except (ValueError, ValidationError) as error:
        return f"{error}: {choice.message.content!r}"
    return None


def drafts(answer: ChatCompletion) -> Counter[str]:
    """Returns the draft counts in vLLM's metrics field."""
    counts = Counter(tokens=answer.usage.completion_tokens)
    if metrics := (answer.model_extra or {}).get("metrics"):
        found = metrics["speculative_decoding"]
        counts.update(drafted=found["num_draft_tokens"], accepted=found["num_accepted_draft_tokens"])
    return counts


@pytest.mark.timeout(1800)
def test_a_streamed_call_is_answered_and_the_conversation_goes_on(served: Served, capsys: Any) -> None:
    counts: Counter[str] = Counter()
    for index in range(ROUND_TRIPS):
        messages: list[Any] = [{"role": "user", "content": SCHEMA_PROMPTS[index].prompt}]
        must_call = {"tool_choice": "required", "parallel_tool_calls": False, "max_tokens": MAX_TOKENS}
        called = Streamed(served, messages, index, **must_call)
        (call,) = called.calls.values()
        assert called.finish == "tool_calls"
        Draft202012Validator(SCHEMAS[call["name"]]).validate(json.loads(call["arguments"]))
        function = {"name": call["name"], "arguments": call["arguments"]}
        messages.append(
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": call["id"], "type": "function", "function": function}],
            }
        )
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": json.dumps({"done": True})})
        answer = Streamed(served, messages, index, tool_choice="none", max_tokens=ANSWER_TOKENS)
        assert not answer.calls
        assert answer.text
        assert answer.finish in ("stop", "length")
        unasked = Streamed(served, messages[:1], index, tool_choice="none", max_tokens=1)
        assert answer.prompt_tokens > unasked.prompt_tokens, "the call and its result are in the prompt"
        counts.update(calls=1, accepted=called.accepted + answer.accepted)
        counts[f"calls of {call['name']}"] += 1
    with capsys.disabled():
        print(f"\n{ROUND_TRIPS} round trips: {dict(counts)}")
    assert counts["accepted"] > 0


class Streamed:
    """Answer assembled from a complete stream's chunks."""

    def __init__(self, served: Served, messages: list[Any], seed: int, **fields: Any) -> None:
        self.text = ""
        self.calls: dict[int, dict[str, str]] = {}  # by index
        self.finish: str | None = None
        self.accepted = 0
        self.prompt_tokens = 0
        usage = {"include_usage": True}
        options: dict[str, Any] = {"tools": TOOLS, "seed": seed, "temperature": 0.7, **fields}
        for chunk in served.client.chat.completions.create(
            model=MODEL, messages=messages, stream=True, stream_options=usage, **options
        ):
            if chunk.usage is not None:
                self.prompt_tokens = chunk.usage.prompt_tokens
                self.accepted = chunk.usage.completion_tokens_details.accepted_prediction_tokens
            for choice in chunk.choices:
                self._take(choice)
        assert self.prompt_tokens, "the last chunk, with the usage, has come"

    def _take(self, choice: Any) -> None:
        assert self.finish is None, "nothing comes after the end"
        self.text += choice.delta.content or ""
        for delta in choice.delta.tool_calls or []:
            call = self.calls.setdefault(delta.index, {"id": "", "name": "", "arguments": ""})
            call["id"] += delta.id or ""
            call["name"] += delta.function.name or ""
            call["arguments"] += delta.function.arguments or ""
        self.finish = choice.finish_reason
