"""A server whose model is a few rules: it calls the tool that it is asked to call, else it says a few words.

Run as a program, it prints its address and serves until it is ended.
"""

import asyncio
import json
import re
import socket
from collections.abc import AsyncIterator
from typing import Any

import uvicorn

from cluster.routing.session import Emit, Ended, Generation
from protos.messages import Finish
from serve_app.http.api import create_api
from serve_app.http.conversation.response_templates import find_template
from serve_app.http.metrics import Metrics
from serve_app.http.text import TextCodec
from serve_app.http.wire.replies import HealthReport
from tests.asgi_front import config_of
from tests.talking_tokenizer import MODEL_TYPE, talking_tokenizer

TOKENS_AT_ONCE = 3
TURN = re.compile(r"<\|im_start\|>(\w+)\n(.*?)(?:<\|im_end\|>\n|\Z)", re.DOTALL)


class ObedientModel:
    """Generates what `answer` says to a prompt, several tokens at once."""

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec

    def check_room(self, sessions: int) -> None:
        """There always is."""

    async def generate(self, generation: Generation) -> AsyncIterator[Emit | Ended]:
        text = answer(self._codec.tokenizer.decode(list(generation.prompt)))
        room = generation.max_len - len(generation.prompt)
        tokens = (*self._codec.encode(text), *self._codec.eos_ids)
        for start in range(0, min(room, len(tokens)), TOKENS_AT_ONCE):
            yield Emit(tokens[start : min(room, start + TOKENS_AT_ONCE)], 0, 0)
            await asyncio.sleep(0)
        yield Ended(Finish.LENGTH if room < len(tokens) else Finish.STOP)


def answer(prompt: str) -> str:
    """What is said to a conversation in the talking tokenizer's template."""
    turns = TURN.findall(prompt)[:-1]  # the last is the answer's own
    role, asked = turns[-1]
    tools = json.loads(turns[0][1]) if turns[0][1].startswith("[{") else []
    if role == "tool":
        return f"The tool says: {asked}"
    tool = next((one["function"] for one in tools if one["function"]["name"] in asked), None)
    if tool is None:
        return f"You said: {asked}"
    call = {"name": tool["name"], "arguments": arguments(tool.get("parameters") or {}, asked)}
    return f"<think>A tool is asked for.</think><tool_call>{json.dumps(call, ensure_ascii=False)}</tool_call>"


def arguments(schema: Any, asked: str) -> dict[str, Any]:
    """The first number for each number, the text for each text."""
    number = next(iter(re.findall(r"\d+", asked)), "0")
    kinds = {name: field.get("type") for name, field in schema.get("properties", {}).items()}
    return {name: int(number) if kind in ("integer", "number") else asked for name, kind in kinds.items()}


async def serve() -> None:
    tokenizer = talking_tokenizer()
    codec = TextCodec(tokenizer, (tokenizer.eos_token_id,), find_template("auto", tokenizer, MODEL_TYPE))

    async def health() -> HealthReport:
        return HealthReport(status="ok", audit="off")

    app = create_api(ObedientModel(codec), codec, config_of({}), Metrics(), health)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        print(f"http://127.0.0.1:{listening.getsockname()[1]}/v1", flush=True)  # whoever started it reads
        await uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off")).serve([listening])


if __name__ == "__main__":
    asyncio.run(serve())
