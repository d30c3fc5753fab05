"""`slipstream chat`: a conversation in the terminal, with drafted text in color.

Ctrl-C ends an answer; the conversation keeps the received part.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Annotated

import typer
from rich.console import Console

from serve_app.cli.demo import legend, show_pieces
from serve_app.endpoint_client import ChatEndpoint, ChatQuestion, EndpointError, Piece, Turn

EXIT_COMMAND = "/bye"
NEW = "/new"
OPTIONS: Mapping[str, str] = MappingProxyType(
    {"max_tokens": "--max-tokens", "speculation.draft_tokens": "--draft-tokens", "seed": "--seed"}
)
"""Options of `chat` by request field."""
ApiKey = Annotated[
    str | None, typer.Option("--api-key", envvar="SLIPSTREAM_API_KEY", help="API key, if the server requires one.")
]


@dataclass(slots=True)
class Conversation:
    """Conversation so far, and the parameters of its answers."""

    max_tokens: int
    temperature: float
    draft_tokens: int | None
    seed: int | None
    system: str | None = None
    turns: list[Turn] = field(default_factory=list)

    def question(self, prompt: str) -> ChatQuestion:
        """Returns the user's next question with all earlier messages."""
        system = [("system", self.system)] if self.system is not None else []
        return ChatQuestion(
            prompt,
            self.max_tokens,
            draft_tokens=self.draft_tokens,
            temperature=self.temperature,
            earlier=(*system, *self.turns),
            seed=self.seed,
        )

    def add(self, prompt: str, answer: str) -> None:
        """Adds a question and its answer, complete or partial; adds neither if the answer is empty."""
        if answer:
            self.turns += [("user", prompt), ("assistant", answer)]


def chat(
    url: Annotated[str, typer.Option(help="Base URL of the endpoint.")] = "http://127.0.0.1:8000",
    system: Annotated[str | None, typer.Option(help="System message of the conversation.")] = None,
    temperature: Annotated[float, typer.Option(min=0, max=2, help="Sampling temperature; 0: greedy.")] = 0.0,
    max_tokens: Annotated[int, typer.Option(min=1, help="Maximum tokens per answer.")] = 512,
    draft_tokens: Annotated[
        int | None, typer.Option(min=0, help="Maximum draft length; 0: no speculation; default: the server's.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of random sampling; makes answers reproducible.")] = None,
    key: ApiKey = None,
) -> None:
    """Chats with a running Slipstream and colors drafted text. Ctrl-C ends an answer, Ctrl-D the conversation."""
    console = Console()
    conversation = Conversation(max_tokens, temperature, draft_tokens, seed, system)
    with asyncio.Runner() as runner:
        model = runner.run(_model(url, key))
        console.print(
            f"{model} at {url}. {NEW} starts a new conversation; {EXIT_COMMAND} or Ctrl-D ends.", markup=False
        )
        console.print(legend(console))
        while (prompt := _next_prompt(console)) is not None:
            if prompt == NEW:
                conversation.turns.clear()
            elif prompt:
                _answer(runner, url, key, model, conversation, prompt, console)


def _next_prompt(console: Console) -> str | None:
    """Returns the next prompt; None at the end of input."""
    try:
        prompt = console.input("\n> ", markup=False).strip()
    except EOFError:
        return None
    except KeyboardInterrupt:
        console.print(f"\n{EXIT_COMMAND} or Ctrl-D ends the conversation.")
        return ""
    return None if prompt == EXIT_COMMAND else prompt


def _answer(
    runner: asyncio.Runner,
    url: str,
    key: str | None,
    model: str,
    conversation: Conversation,
    prompt: str,
    console: Console,
) -> None:
    """Streams one answer; after a failure the conversation goes on."""
    texts: list[str] = []

    def show(pieces: Sequence[Piece]) -> None:
        texts.extend(text for text, _ in pieces)
        show_pieces(pieces, console)

    async def ask() -> str:
        async with ChatEndpoint.at(url, key) as endpoint:
            answer = await endpoint.ask(model, conversation.question(prompt), show)
        share = f"{answer.accepted} of {answer.tokens} tokens drafted and accepted"
        return f"[{share}, {answer.rejected} rejected, {answer.tokens / answer.latency_s:.1f} tokens/s]"

    try:
        summary = runner.run(ask())
    except KeyboardInterrupt:
        summary = "[stopped]"
    except EndpointError as error:
        summary = f"[{with_option(error)}]"
    conversation.add(prompt, "".join(texts))
    console.print(f"\n{summary}", style="dim", markup=False, highlight=False)


def with_option(error: EndpointError) -> str:
    """Returns the error's message, with the option that sets the refused field."""
    option = OPTIONS.get(error.param or "")
    return str(error) if option is None else f"{error}; set {option}"


async def _model(url: str, key: str | None) -> str:
    async with ChatEndpoint.at(url, key) as endpoint:
        return await endpoint.model()
