"""Server with a rule-based model: it calls the requested tool, or answers with a few words.

JSON answers contain the keys quoted in the prompt. Under a grammar, it calls any tool that fits, or gives the shortest
answer that it knows. As a program, it prints its address and serves until terminated.
"""

import asyncio
import json
import re
import socket
from collections.abc import Callable
from typing import Any

import uvicorn

from cluster.routing.ledger import CommittedTokens, Ended, Event, Generation
from protos.messages import Finish
from serve_app.api.text import TextCodec
from tests.asgi_front import talking_codec, toy_api

TOKENS_AT_ONCE = 3
SHORTEST = ("<tool_call>", "</think>", '"', "}", "]", ":", ",", "{", "[", "1")  # tried before all other tokens
TURN = re.compile(r"<\|im_start\|>(\w+)\n(.*?)(?:<\|im_end\|>\n|\Z)", re.DOTALL)


class ObedientModel:
    """Generates the result of `answer` for a prompt, several tokens per event."""

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec
        self._grammars = codec.grammars()
        self._preferred = [token for text in SHORTEST for token in codec.encode(text)]

    def check_room(self, sessions: int) -> None:
        """Accepts every session."""

    def start(self, generation: Generation, deliver: Callable[[Event], None]) -> Callable[[], None]:
        return asyncio.create_task(self._play(generation, deliver)).cancel

    async def _play(self, generation: Generation, deliver: Callable[[Event], None]) -> None:
        texts = answers(self._codec.tokenizer.decode(list(generation.prompt)))
        room = generation.max_len - len(generation.prompt)
        wished = [(*self._codec.encode(text), *self._codec.eos_ids) for text in texts]
        tokens = self._formed(generation.grammar, wished, room) if generation.grammar else wished[0]
        for start in range(0, min(room, len(tokens)), TOKENS_AT_ONCE):
            deliver(CommittedTokens(tokens[start : min(room, start + TOKENS_AT_ONCE)], 0, 0))
            await asyncio.sleep(0)
        deliver(Ended(Finish.LENGTH if room < len(tokens) else Finish.STOP))

    def _formed(self, grammar: str, wished: list[tuple[int, ...]], room: int) -> tuple[int, ...]:
        """Returns the first preferred answer that the grammar allows, or another that it allows."""
        whole = (self._along(grammar, tokens, len(tokens)) for tokens in wished)
        found = next((tokens for tokens in whole if tokens in wished), None)
        return found or self._along(grammar, (), room + 1)

    def _along(self, grammar: str, wished: tuple[int, ...], most: int) -> tuple[int, ...]:
        """Returns an answer that the grammar allows; follows the preferred answer as far as allowed."""
        assert self._grammars is not None, "the codec's vocabulary has grammars"
        followed = self._grammars.follow(grammar)
        tokens: list[int] = []
        while len(tokens) < most and not (tokens and tokens[-1] in self._codec.eos_ids):
            (mask,) = followed.masks([()])
            assert mask is not None, "it has not ended"
            next_wished = wished[len(tokens) :][:1]
            order = (*next_wished, *self._codec.eos_ids, *self._preferred, *range(self._codec.vocabulary))
            tokens.append(next(token for token in order if mask[token // 8] >> token % 8 & 1))
            followed.advance(tokens[-1:])
        return tuple(tokens)


def answers(prompt: str) -> list[str]:
    """Returns possible answers to a conversation in the talking tokenizer's template, best first."""
    turns = TURN.findall(prompt)[:-1]  # the last turn is the answer's own
    role, asked = turns[-1]
    tools = [tool["function"] for tool in json.loads(turns[0][1])] if turns[0][1].startswith("[{") else []
    calls = [call(tool, asked) for tool in sorted(tools, key=lambda tool: not is_meant(tool["name"], asked))]
    if role == "tool":
        return [f"The tool says: {asked}", *calls]
    if any(is_meant(tool["name"], asked) for tool in tools):
        return [f"<think>A tool is asked for.</think>{calls[0]}", *calls]
    if "JSON" in asked:
        return [json.dumps(dict.fromkeys(re.findall(r"'(\w+)'", asked), "some")), *calls]
    return [f"You said: {asked}", *calls]


def is_meant(name: str, asked: str) -> bool:
    """Returns whether a tool is requested by its name or a long word of it."""
    return name in asked or any(word in asked.lower() for word in name.split("_") if len(word) > 5)


def call(tool: Any, asked: str) -> str:
    made = {"name": tool["name"], "arguments": arguments(tool.get("parameters") or {}, asked)}
    return f"<tool_call>{json.dumps(made, ensure_ascii=False)}</tool_call>"


def arguments(schema: Any, asked: str) -> dict[str, Any]:
    """Returns arguments from the prompt: its first number for numbers, its text for strings."""
    number = next(iter(re.findall(r"\d+", asked)), "0")
    kinds = {name: field.get("type") for name, field in schema.get("properties", {}).items()}
    return {name: int(number) if kind in ("integer", "number") else asked for name, kind in kinds.items()}


async def serve() -> None:
    codec = talking_codec()

    app = toy_api(ObedientModel(codec), codec)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        print(f"http://127.0.0.1:{listening.getsockname()[1]}/v1", flush=True)  # for the parent process
        await uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off")).serve([listening])


if __name__ == "__main__":
    asyncio.run(serve())
