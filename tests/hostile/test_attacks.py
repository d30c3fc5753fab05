"""Eight streams continue under attacks on the demo deployment, and no resources leak.

Not part of the default suite: `make test-hostile`. `-s` prints the measurements. The test prints the latency of
refusals but does not assert it, because it depends on the machine's load. `docs/benchmarks.md` has figures for a busy
machine.
"""

import asyncio
import json
import statistics
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from serve_app.cli.demo import demo_config
from tests.hostile.attack import ASKS, FAULT, FAULTS, hostile_bodies
from tests.integration.serving import Served, demo_served
from tests.integration.test_serving import assert_nothing_left

MODEL = "SmolLM2-135M-Instruct"
STREAMS = 8
WARM_UP_S = 60.0
SETTLES_S = 10.0
SECONDS = {
    "bodies": 30.0,
    "slow_readers": 30.0,
    "trickling": 30.0,
    "leaving": 30.0,
    "overload": 60.0,
    **dict.fromkeys(ASKS, 60.0),  # enough to send each request at least once
}
WORST = 3  # limit of the worst gap, relative to the usual worst gap
OVERLOAD = 10  # request rate, relative to the idle deployment's rate
ORDINARY_S = 20.0
NEWCOMER_EVERY_S = 3.0
SERVED_OR_REFUSED = frozenset({200, 429})
STATUSES = {  # allowed statuses by kind; 0: no answer to silence or a disconnect
    "slow_readers": SERVED_OR_REFUSED,
    "trickling": frozenset({408, 429}),
    "leaving": frozenset({0}),
    "overload": SERVED_OR_REFUSED,
}
CUT_OFF = ("too large", 0)  # the server may disconnect the client during its upload
MAX_KEPT_BYTES = 50 << 20  # allowed memory growth per process
MAX_OPEN_FILES = 8  # allowed growth of open file descriptors
CALM_S = 5.0  # for closing connections and freeing memory
LOOKED_AT = ("ProxyActor", "ServeReplica", "Rank")


@pytest.fixture(scope="module")
def breakable(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Saves the demo's target with a chat template that fails if FAULT is set."""
    whole = Path(demo_config().model.target).expanduser()
    folder = tmp_path_factory.mktemp("models") / MODEL
    folder.mkdir()
    for file in whole.iterdir():
        (folder / file.name).symlink_to(file)
    template = folder / "chat_template.jinja"
    own = template.read_text()
    template.unlink()
    faults = "".join(f"{{% if {FAULT} == '{name}' %}}{fault}{{% endif %}}" for name, fault in FAULTS.items())
    template.write_text(faults + own)
    return folder


@pytest.fixture(scope="module")
def served(breakable: Path) -> Iterator[Served]:
    caches = ("target.cache_per_rank.gib=0.35", "draft.cache.gib=0.1")  # so that the warm-up nearly fills them
    bounds = ("server.max_requests=40", "server.body_timeout_s=5")
    with demo_served(f"model.target={breakable}", f"model.served_name={MODEL}", *bounds, *caches) as served:
        asyncio.run(warm_up(served.url))
        yield served
        assert_nothing_left(served)


async def warm_up(url: str) -> None:
    """Makes the server allocate its whole cache, and buffers for the largest bodies."""
    streaming = asyncio.create_task(Watched(url).run())
    used = 0
    while (now := sum(one.memory for one in held().values())) > used + MAX_KEPT_BYTES // 5:
        used = now
        await asyncio.sleep(WARM_UP_S)
    await attacked(url, "bodies", SECONDS["bodies"])
    await stopped(streaming)


async def stopped(streaming: asyncio.Task[None]) -> None:
    """Cancels the task; raises the error that ended it early, if any."""
    streaming.cancel()
    with suppress(asyncio.CancelledError):
        await streaming


@dataclass
class Watched:
    """Back-to-back streams with the gaps between their events.

    Each run requests the same texts, because a character of several tokens also causes a gap. Other requests must not
    change the texts.
    """

    url: str
    gaps: list[float] = field(default_factory=list)  # seconds
    failures: Counter[str] = field(default_factory=Counter)
    texts: dict[int, str] = field(default_factory=dict)  # by stream number; the last texts may be incomplete
    _begun: int = 0

    async def run(self) -> None:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=self.url, timeout=120, limits=limits) as client:
            await asyncio.gather(*(self._stream_on(client) for _ in range(STREAMS)))

    async def _stream_on(self, client: httpx.AsyncClient) -> None:
        while True:
            self._begun += 1
            number = self._begun
            body = {"model": MODEL, "prompt": f"Chapter {number}.", "max_tokens": 900, "ignore_eos": True}
            asked = body | {"seed": number, "stream": True}
            async with client.stream("POST", "/v1/completions", json=asked) as answer:
                if answer.status_code != 200:
                    self.failures[str(answer.status_code)] += 1
                    await asyncio.sleep(0.5)
                    continue
                await self._follow(number, answer)

    async def _follow(self, number: int, answer: httpx.Response) -> None:
        last: float | None = None
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                now = time.monotonic()
                if last is not None:
                    self.gaps.append(now - last)
                last = now
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    self.failures["event"] += 1
                for choice in event.get("choices", ()):
                    self.texts[number] = self.texts.get(number, "") + choice["text"]

    def taken(self) -> list[float]:
        """Returns the gaps since the last call."""
        taken = self.gaps
        self.gaps = []
        assert len(taken) > 10 * STREAMS, f"the streams hardly went on: {dict(self.failures)}"
        return taken


@asynccontextmanager
async def watched_streams(url: str) -> AsyncIterator[Watched]:
    """Runs the streams; yields them once resources have settled."""
    watched = Watched(url)
    streaming = asyncio.create_task(watched.run())
    try:
        await asyncio.sleep(SETTLES_S)
        watched.gaps.clear()
        yield watched
    finally:
        await stopped(streaming)


@dataclass(frozen=True)
class Held:
    """Resources of a process."""

    memory: int  # unshared bytes
    files: int


def held() -> dict[str, Held]:
    """Returns the resources of each serving process."""
    found = {}
    for process in psutil.Process().children(recursive=True):
        if process.status() == psutil.STATUS_ZOMBIE:
            continue
        name = " ".join(process.cmdline()).strip()
        if any(part in name for part in LOOKED_AT):
            found[f"{name.partition('.')[0]} {process.pid}"] = Held(process.memory_full_info().uss, process.num_fds())
    assert found, "no process that serves was found"
    return found


@pytest.fixture(scope="module")
def usual_rate(served: Served) -> float:
    """Returns the idle deployment's requests per second."""
    answers = asyncio.run(attacked(served.url, "ordinary", ORDINARY_S))
    assert {one["status"] for one in answers} == {200}
    rate = len(answers) / ORDINARY_S
    print(f"\nusually {rate:.1f} requests are answered in a second")
    return rate


async def attacked(url: str, kind: str, seconds: float, *rate: float) -> list[dict[str, Any]]:
    """Runs an attack; returns the attacker's answers."""
    command = (sys.executable, "-m", "tests.hostile.attack", kind, url, MODEL, str(seconds), *map(str, rate))
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    output, _ = await process.communicate()
    assert process.returncode == 0
    return [json.loads(line) for line in output.splitlines()]


async def newcomers_served(url: str, attacking: asyncio.Task[Any]) -> list[int]:
    """Returns the answers to new clients while an attack holds all slots."""
    found = []
    body = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 4}
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:
        while not (await asyncio.wait((attacking,), timeout=NEWCOMER_EVERY_S))[0]:
            found.append((await client.post("/v1/completions", json=body)).status_code)
    assert found, "nobody came"
    return found


def describe(gaps: list[float]) -> str:
    worst = max(gaps)
    middle = statistics.median(gaps)
    return f"{len(gaps)} gaps, median {1000 * middle:.0f} ms, worst {1000 * worst:.0f} ms"


@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", SECONDS)
async def test_streams_continue_and_nothing_remains(served: Served, usual_rate: float, kind: str) -> None:
    rate = (OVERLOAD * usual_rate,) if kind == "overload" else ()
    async with watched_streams(served.url) as watched:
        before = held()
        await asyncio.sleep(SECONDS[kind])  # as long as the attack, because the worst gap grows with time
        usual = watched.taken()
    undisturbed = watched.texts
    async with watched_streams(served.url) as watched:
        attacking = asyncio.create_task(attacked(served.url, kind, SECONDS[kind], *rate))
        newcomers = await newcomers_served(served.url, attacking) if kind == "trickling" else []
        answers = await attacking
        under = watched.taken()
        await asyncio.sleep(CALM_S)
        after = held()
    print(f"\n{kind}: usually {describe(usual)}; under attack {describe(under)}; {dict(watched.failures)}")
    print(f"  {len(answers)} exchanges; newcomers got {newcomers}")
    print_answers(answers)
    print_growth(before, after)
    await asyncio.to_thread(assert_nothing_left, served)
    check(kind, answers)
    assert set(newcomers) <= {200}
    assert not watched.failures
    check_texts(undisturbed, watched.texts)
    assert max(under) < WORST * max(usual)
    assert before.keys() == after.keys(), "a process was replaced"
    for name, one in after.items():
        assert one.memory < before[name].memory + MAX_KEPT_BYTES, f"{name} keeps memory"
        assert one.files < before[name].files + MAX_OPEN_FILES, f"{name} keeps files open"


def print_answers(answers: list[dict[str, Any]]) -> None:
    """Prints the count and latency of each answer."""
    rows: dict[tuple[str, int, str], list[float]] = {}
    for one in answers:
        words = one["param"] or ""
        rows.setdefault((one["name"], one["status"], words), []).append(one["ms"])
    for (name, status, words), ms in sorted(rows.items(), key=str):
        print(f"  {name}: {status} {words}, {len(ms)} times, median {statistics.median(ms)} ms, worst {max(ms)} ms")


def print_growth(before: dict[str, Held], after: dict[str, Held]) -> None:
    for name, one in after.items():
        if name not in before:
            print(f"  {name}: new")
            continue
        grown = (one.memory - before[name].memory) / (1 << 20)
        print(f"  {name}: {grown:+.1f} MB, {one.files - before[name].files:+} files")


def check(kind: str, answers: list[dict[str, Any]]) -> None:
    """Asserts that each answer is an allowed success, or a proper refusal by a router or Serve's proxy."""
    asked = ASKS[kind](MODEL) if kind in ASKS else {}
    if kind == "bodies":
        check_bodies(answers)
    elif asked:
        others = Counter((one["name"], one["status"]) for one in answers if one["status"] != asked[one["name"]].status)
        assert not others, others
        assert {one["name"] for one in answers} == asked.keys()
    else:
        others = Counter((one["name"], one["status"]) for one in answers if one["status"] not in STATUSES[kind])
        assert not others, others
    for one in answers:
        if one["status"] >= 400 and (one["name"] not in asked or asked[one["name"]].is_clear_error):
            assert one["is_error"], f"no error in OpenAI's form: {one}"
        if one["status"] == 429:
            assert one["retry_after"], f"nothing says when to try again: {one}"
    statuses = Counter(one["status"] for one in answers)
    if kind == "overload":
        assert statuses[429] > statuses[200] > 0, f"it was no overload: {statuses}"


def check_texts(undisturbed: dict[int, str], under: dict[int, str]) -> None:
    """Asserts that the streams of both runs have equal texts, as far as both got."""
    both = undisturbed.keys() & under.keys()
    lengths = {number: min(len(undisturbed[number]), len(under[number])) for number in both}
    print(f"  {len(both)} streams, {sum(lengths.values())} characters compared")
    assert len(both) >= STREAMS
    for number, length in lengths.items():
        assert undisturbed[number][:length] == under[number][:length], f"stream {number} has another text"


def check_bodies(answers: list[dict[str, Any]]) -> None:
    """Asserts that every body was refused."""
    found = Counter((one["name"], one["status"]) for one in answers)
    refused = Counter(one["name"] for one in answers if 400 <= one["status"] < 500)
    others = {key: count for key, count in found.items() if not 400 <= key[1] < 500}
    assert not others.keys() - {CUT_OFF}, others
    assert refused.keys() | {CUT_OFF[0]} == hostile_bodies(MODEL).keys()
