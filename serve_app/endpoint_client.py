"""Client of the HTTP endpoint: streaming chat, health, model name, counters."""

import json
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import astuple, dataclass
from itertools import pairwise
from operator import add, sub
from typing import Any, Literal, Self

import httpx
from prometheus_client.parser import text_string_to_metric_families

from cluster.errors import SlipstreamError

TIMEOUT = httpx.Timeout(300, connect=5)
LIMITS = httpx.Limits(max_connections=None)

COUNTED_METRICS = (
    "completion_tokens",
    "draft_tokens",
    "accepted_tokens",
    "verifies",
    "blocks",
)  # in the order of Tally's fields

Piece = tuple[str, bool]
"""Text of one token, and whether the token was drafted."""


Turn = tuple[str, str]
"""Role and text of a message."""


class EndpointError(SlipstreamError):
    """The endpoint cannot be reached or refuses the request; `param` is the request field that it refuses."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


@dataclass(frozen=True, slots=True)
class Tally:
    """Counts of verified blocks and tokens."""

    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    verifies: int = 0
    blocks: int = 0  # verify steps with a block; all others decode without speculation

    def __add__(self, other: "Tally") -> "Tally":
        return Tally(*map(add, astuple(self), astuple(other)))

    def __sub__(self, other: "Tally") -> "Tally":
        return Tally(*map(sub, astuple(self), astuple(other)))

    @property
    def rejected(self) -> int:
        return self.drafted - self.accepted

    @property
    def acceptance_rate(self) -> float | None:
        return self.accepted / self.drafted if self.drafted else None

    @property
    def acceptance_length(self) -> float | None:
        """Returns the mean tokens committed per verified block."""
        return 1 + self.accepted / self.blocks if self.blocks else None


@dataclass(frozen=True, slots=True)
class TimedAnswer:
    """One answer, with its arrival times at the client."""

    text: str
    tokens: int
    accepted: int
    rejected: int
    first_token_s: float
    latency_s: float
    gaps_s: tuple[float, ...] = ()  # seconds between events that carry text


@dataclass(frozen=True, slots=True)
class ChatQuestion:
    """One user message and its parameters; None selects the server's default."""

    prompt: str
    max_tokens: int
    ignore_eos: bool = False
    draft_tokens: int | None = None
    temperature: float = 0.0
    acceptance: Literal["coupled", "rejection"] | None = None
    earlier: Sequence[Turn] = ()  # messages of the conversation before this question
    seed: int | None = None

    @property
    def messages(self) -> list[dict[str, str]]:
        """Returns the whole conversation in the API's message format."""
        return [{"role": role, "content": text} for role, text in (*self.earlier, ("user", self.prompt))]


class ChatEndpoint:
    """HTTP client of one endpoint."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self._http = http

    @classmethod
    @asynccontextmanager
    async def at(cls, url: str, key: str | None = None) -> AsyncIterator["ChatEndpoint"]:
        """Connects to a base URL such as http://127.0.0.1:8000, with an API key if the server requires one.

        Transport failures raise EndpointError.
        """
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        async with httpx.AsyncClient(
            base_url=url, headers=headers, timeout=TIMEOUT, limits=LIMITS, trust_env=False
        ) as http:
            try:
                yield cls(http)
            except httpx.HTTPError as error:
                fix = "check the URL, and whether the server runs"
                raise EndpointError(f"{url} does not answer: {error or type(error).__name__}; {fix}") from error

    async def health(self) -> dict[str, Any]:
        """Returns the body of /health for any HTTP status."""
        response = await self._http.get("/health")
        try:
            report: dict[str, Any] = response.json()
        except ValueError as error:
            raise EndpointError(f"{response.url} answers {response.text[:100]!r}; is this Slipstream?") from error
        return report

    async def model(self) -> str:
        """Returns the served model's name."""
        response = await self._http.get("/v1/models")
        _check(response)
        return str(response.json()["data"][0]["id"])

    async def page_state(self) -> dict[str, Any]:
        """Returns the state of the live page."""
        response = await self._http.get("/page/state")
        if response.status_code == 404:
            raise EndpointError(f"{response.url} does not exist; set server.page: true on the server")
        _check(response)
        state: dict[str, Any] = response.json()
        return state

    async def counters(self) -> "Counters":
        """Returns the sum of all routers' counters."""
        return Counters.parse(await self.exposition())

    async def exposition(self) -> str:
        """Returns all metrics in Prometheus' text format."""
        response = await self._http.get("/metrics")
        _check(response)
        return response.text

    async def ask(
        self, model: str, question: ChatQuestion, on_pieces: Callable[[Sequence[Piece]], None] | None = None
    ) -> TimedAnswer:
        """Streams one answer; passes arriving tokens to `on_pieces`, each marked as drafted or not."""
        reader = _StreamReader(on_pieces)
        body = _body(model, question, trace=on_pieces is not None)
        async with self._http.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.is_error:
                await response.aread()
                _check(response)
            async for line in response.aiter_lines():
                reader.line(line)
        return reader.answer()


@dataclass(frozen=True, slots=True)
class Counters:
    """Router counters since the routers started."""

    running_requests: int
    tally: Tally

    @classmethod
    def parse(cls, exposition: str) -> Self:
        """Reads the counters from Prometheus' text format."""
        families = text_string_to_metric_families(exposition)
        values: dict[str, int] = {}
        for sample in (sample for family in families for sample in family.samples):
            name = sample.name.removeprefix("slipstream_")
            if name in ("running_requests", *(f"{one}_total" for one in COUNTED_METRICS)):
                values[name] = values.get(name, 0) + int(sample.value)
        try:
            return cls(values["running_requests"], Tally(*(values[f"{name}_total"] for name in COUNTED_METRICS)))
        except KeyError as error:
            raise EndpointError(f"the metrics lack slipstream_{error.args[0]}; is this Slipstream?") from error


class _StreamReader:
    """Reads the lines of one event stream into an answer."""

    def __init__(
        self, on_pieces: Callable[[Sequence[Piece]], None] | None, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._on_pieces = on_pieces
        self._clock = clock
        self._text = ""
        self._usage: Mapping[str, Any] | None = None
        self._started = clock()
        self._text_came_s: list[float] = []

    def line(self, line: str) -> None:
        name, _, data = line.partition(": ")
        if name != "data" or data == "[DONE]":
            return
        event = json.loads(data)
        if "error" in event:
            raise EndpointError(f"the answer broke off: {event['error']['message']}")
        self._usage = event.get("usage") or self._usage
        text = "".join(choice["delta"].get("content", "") for choice in event["choices"])
        if text:
            self._text_came_s.append(self._clock() - self._started)
        self._text += text
        pieces = (event.get("slipstream") or {}).get("pieces", [])
        if self._on_pieces is not None and pieces:
            self._on_pieces([(text, drafted) for text, drafted in pieces])

    def answer(self) -> TimedAnswer:
        if self._usage is None:
            raise EndpointError("the answer's stream ended without its usage")
        latency_s = self._clock() - self._started
        details = self._usage["completion_tokens_details"]
        return TimedAnswer(
            text=self._text,
            tokens=self._usage["completion_tokens"],
            accepted=details["accepted_prediction_tokens"],
            rejected=details["rejected_prediction_tokens"],
            first_token_s=self._text_came_s[0] if self._text_came_s else latency_s,
            latency_s=latency_s,
            gaps_s=tuple(later - earlier for earlier, later in pairwise(self._text_came_s)),
        )


def _body(model: str, question: ChatQuestion, trace: bool) -> dict[str, Any]:
    speculation: dict[str, Any] = {"trace": trace}
    if question.draft_tokens is not None:
        speculation["draft_tokens"] = question.draft_tokens
    if question.acceptance is not None:
        speculation["acceptance"] = question.acceptance
    seed = {} if question.seed is None else {"seed": question.seed}
    return {
        **seed,
        "model": model,
        "messages": question.messages,
        "max_tokens": question.max_tokens,
        "ignore_eos": question.ignore_eos,
        "temperature": question.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
        "speculation": speculation,
    }


def _check(response: httpx.Response) -> None:
    if response.is_success:
        return
    request = response.request
    if response.status_code == httpx.codes.UNAUTHORIZED:
        is_wrong = "Authorization" in request.headers
        problem = "does not accept this API key; correct" if is_wrong else "requires an API key; set"
        raise EndpointError(f"{request.url} {problem} --api-key or SLIPSTREAM_API_KEY")
    try:
        error = response.json()["error"]
        message, param = error["message"], error.get("param")
    except (ValueError, KeyError, TypeError):
        message, param = response.text[:300], None
    raise EndpointError(f"{request.url} answered {response.status_code}: {message}", param)
