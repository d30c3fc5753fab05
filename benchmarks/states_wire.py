"""Measures the wire cost of hidden states: bytes per token between target and drafter.

    python benchmarks/states_wire.py [--arms "eagle3 at target,medusa"] [--prompts 4] [--tokens 48] [--json OUT]

Runs the demo's target with a random-weight head for each method, projection side and state format, in lock step over
real gRPC in one process. Counts the bytes of the written frames. The target sends each token's state once, whether or
not the token was drafted, so the head's accuracy affects only the number of rounds.
"""

import argparse
import asyncio
import json
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from random_heads import random_head
from rich.console import Console
from rich.progress import track
from rich.table import Table

from actors.compute.hidden_states import CaptureSpec, StateCapture
from actors.drafter import Drafter
from actors.drafters.registry import DraftSetup, capture_spec, create_method, state_bounds
from actors.engine.executor import StepExecutor, ThreadEngine
from actors.engine.runner import ModelRunner
from actors.models.checkpoint import load_model, vocabulary
from actors.net import streams
from actors.servers import GrpcServer, serve_drafter, serve_target
from actors.target import TargetReplica
from cluster.audit import Audits
from cluster.config import AuditConfig, SlipstreamConfig
from cluster.drafting.session_table import DrafterLimits
from cluster.errors import SlipstreamError
from cluster.routing.ledger import CommittedTokens, Generation
from cluster.routing.membership import Endpoint, Members
from cluster.speculation.controller import LockStep
from cluster.verification.scheduler import VerificationLimits
from protos import speculation_pb2 as pb
from protos.messages import Acceptance, Frame, Identity, Sampling, States
from serve_app.api.text import TextCodec
from serve_app.cli.demo import demo_config, prepare_target
from serve_app.demo_data import BENCH_PROMPTS
from serve_app.router import Router, RouterLimits
from serve_app.tables import shown, table
from tests.session_events import events_of
from tests.static_membership import StaticMembership
from tools.bench.experiment import read_prompts

CPU = torch.device("cpu")
CONTEXT = 1024
PAGE_SIZE = 16
PAGES = CONTEXT // PAGE_SIZE
BLOCK = 3
IDENTITY = Identity("demo", "demo")
TO_DRAFTER = (pb.TargetToDrafter, pb.TargetToDrafterStates)
FROM_DRAFTER = (pb.DrafterToTarget, pb.DrafterToTargetStates)


@dataclass(frozen=True, slots=True)
class Arm:
    """Draft head, projection side and wire format of its states."""

    head: str
    project: str = "drafter"
    dtype: str = "bfloat16"

    @property
    def name(self) -> str:
        place = " at target" if self.project == "target" else ""
        return f"{self.head}{place}{' float8' if self.dtype == 'float8' else ''}"

    @property
    def method(self) -> str:
        return "eagle" if self.head.startswith("eagle") else self.head

    def draft(self, target: Path, scratch: Path, resources: str = "{num_cpus: 0.1}") -> str:
        """Writes the head to `scratch`; returns the `draft` section as a configuration override."""
        folder = random_head(self.head, target, scratch / self.head)
        states = f"{{project: {self.project}, dtype: {self.dtype}}}"
        return f"draft={{method: {self.method}, model: {folder}, states: {states}, resources: {resources}}}"


ARMS = tuple(
    Arm(head, project, dtype)
    for head, places in (
        ("eagle3", ("target", "drafter")),
        ("eagle1", ("drafter",)),
        ("medusa", ("drafter",)),
        ("mlp_speculator", ("drafter",)),
        ("dflash", ("target", "drafter")),
    )
    for project in places
    for dtype in ("bfloat16", "float8")
)

# ---------------------------------------------------------------- bytes


@dataclass(frozen=True, slots=True)
class Wire:
    """Written bytes per answer token, except `prompt_states`, which is per prompt token."""

    arm: str
    row: int  # bytes of one encoded state
    prompt_states: float
    states: float
    rest_to_drafter: float
    from_drafter: float
    rounds: int
    tokens: int  # in all answers


class FrameCounter:
    """Counts the bytes of written frames and of their messages with hidden states."""

    def __init__(self, prompt_len: Mapping[str, int]) -> None:
        self._prompt_len = prompt_len  # by session
        self._encode = streams.encode
        self.begin()

    def begin(self) -> None:
        """Resets all counts."""
        self.frames: Counter[str] = Counter()  # by type
        self.prompt_states = 0
        self.states = 0

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Counts the frames of streams opened inside this context; open streams keep the uncounted encoder."""
        streams.encode = self._counted  # type: ignore[assignment]
        try:
            yield
        finally:
            streams.encode = self._encode

    def bytes_of(self, kinds: Sequence[type]) -> int:
        return sum(self.frames[kind.__name__] for kind in kinds)

    def _counted(self, frame_type: Any, messages: Frame) -> Any:
        frame = self._encode(frame_type, messages)
        self.frames[frame_type.__name__] += frame.ByteSize()
        for message in messages:
            if isinstance(message, States):
                self._count(frame_type, message)
        return frame

    def _count(self, frame_type: Any, message: States) -> None:
        """Splits a message's bytes between prompt and answer in proportion to its rows."""
        size = self._encode(frame_type, [message]).ByteSize()
        of_prompt = min(message.end, self._prompt_len[message.session]) - message.first
        share = max(0, of_prompt) / (message.end - message.first)
        self.prompt_states += round(size * share)
        self.states += round(size * (1 - share))


async def wire_of(arm: Arm, config: SlipstreamConfig, model: Any, asked: Sequence[Generation]) -> Wire:
    """Runs all generations in sequence, after an uncounted run of the first that establishes all connections."""
    first = replace(asked[0], session="before")
    prompt_len = {generation.session: len(generation.prompt) for generation in (first, *asked)}
    counter = FrameCounter(prompt_len)
    spec = capture_spec(config.draft, Path(config.model.target), config.model.dtype)
    assert spec is not None, "every arm's head reads hidden states"
    rounds = 0
    tokens = 0
    with counter.attached():
        async with connected(config, model, spec) as router:
            await emitted(router, first)
            counter.begin()
            for generation in asked:
                emits = await emitted(router, generation)
                rounds += len(emits)
                tokens += sum(len(emit.tokens) for emit in emits)
    prompts = sum(len(generation.prompt) for generation in asked)
    rest = counter.bytes_of(TO_DRAFTER) - counter.states - counter.prompt_states
    return Wire(
        arm=arm.name,
        row=spec.format.row_bytes,
        prompt_states=counter.prompt_states / prompts,
        states=counter.states / tokens,
        rest_to_drafter=rest / tokens,
        from_drafter=counter.bytes_of(FROM_DRAFTER) / tokens,
        rounds=rounds,
        tokens=tokens,
    )


async def emitted(router: Router, generation: Generation) -> list[CommittedTokens]:
    return [event async for event in events_of(router, generation) if isinstance(event, CommittedTokens)]


@asynccontextmanager
async def connected(config: SlipstreamConfig, model: Any, spec: CaptureSpec) -> AsyncIterator[Router]:
    """Runs a target and a drafter that communicate over gRPC in this process; yields their router."""
    folder = Path(config.model.target)
    capture = StateCapture(spec, PAGES, PAGE_SIZE, CPU, spec.projection_on(CPU))
    runner = ModelRunner(model, PAGES, PAGE_SIZE, capture=capture)
    engine = ThreadEngine(StepExecutor(runner, runner.vocabulary))
    limits = VerificationLimits(
        runner.vocabulary, CONTEXT, 1, max_step_tokens=512, pages=PAGES, page_size=PAGE_SIZE, states=spec.format
    )
    target = TargetReplica(engine, limits, IDENTITY.vocabulary, IDENTITY.target_model, 60, LockStep())
    setup = DraftSetup(config.model.dtype, CONTEXT, BLOCK, vocabulary(folder), config.model.target, spec.format)
    drafter = Drafter(
        create_method(config.draft, setup),
        DrafterLimits(runner.vocabulary, CONTEXT, 1, spec.format, state_bounds(config.draft, folder)),
        {"": IDENTITY},
        draft_ahead=False,
    )
    servers: list[GrpcServer] = [await serve_target(target, "127.0.0.1"), await serve_drafter(drafter, "127.0.0.1")]
    ends = [(Endpoint(server.address, server.address),) for server in servers]
    audits = Audits(AuditConfig(), config.model.dtype, lambda _: None)
    router = Router(StaticMembership(Members(*ends)), IDENTITY, RouterLimits(1, 30), audits)
    tasks = [asyncio.create_task(part.run()) for part in (target, drafter, router)]
    try:
        yield router
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await router.close()
        await drafter.close()
        for server in servers:
            await server.stop(0)
        await engine.close()


# ---------------------------------------------------------------- command line


def generations(target: Path, prompts: int, tokens: int) -> list[Generation]:
    """The demo's first prompts, each answered with exactly the given number of tokens."""
    text = TextCodec.load(str(target))
    asked = []
    for index, prompt in enumerate(read_prompts(BENCH_PROMPTS)[:prompts]):
        ids = tuple(text.encode_chat([{"role": "user", "content": prompt.prompt}]))
        asked.append(
            Generation(
                session=f"s{index}",
                prompt=ids,
                max_len=len(ids) + tokens,
                stop_ids=(),
                sampling=Sampling(temperature=0.0),
                seed=index,
                draft_seed=index,
                choice=0,
                hash_key=index,
                acceptance=Acceptance.COUPLED,
                draft_tokens=BLOCK,
            )
        )
    return asked


def wire_table(found: Sequence[Wire]) -> Table:
    columns = "row", "prompt: states", "answer: states", "else to drafter", "from drafter", "rounds a token"
    made = table("Bytes a token", "head", *columns)
    for one in found:
        made.add_row(
            one.arm,
            str(one.row),
            shown(one.prompt_states, ".0f"),
            shown(one.states, ".0f"),
            shown(one.rest_to_drafter, ".0f"),
            shown(one.from_drafter, ".0f"),
            shown(one.rounds / one.tokens),
        )
    return made


def chosen(names: str | None, parser: argparse.ArgumentParser) -> list[Arm]:
    """Returns the arms in a comma-separated list, or all arms without a list."""
    known = {arm.name: arm for arm in ARMS}
    wanted = names.split(",") if names else list(known)
    if unknown := set(wanted) - known.keys():
        parser.error(f"--arms: unknown {', '.join(sorted(unknown))}; choose from {', '.join(known)}")
    return [known[name] for name in wanted]


def measured(arms: Sequence[Arm], prompts: int, tokens: int, console: Console) -> Iterator[Wire]:
    target = Path(demo_config().model.target)
    prepare_target(target, console)
    torch.set_num_threads(1)
    model = load_model(target, "bfloat16", CPU)
    asked = generations(target, prompts, tokens)
    with TemporaryDirectory() as scratch:
        for arm in track(arms, "Arms", console=console):
            config = demo_config(["model.dtype=bfloat16", arm.draft(target, Path(scratch))])
            yield asyncio.run(wire_of(arm, config, model, asked))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", help=f"comma-separated; default: all of {', '.join(arm.name for arm in ARMS)}")
    parser.add_argument("--prompts", type=int, default=4, help="number of demo prompts")
    parser.add_argument("--tokens", type=int, default=48, help="tokens per answer")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write all measurements here")
    arguments = parser.parse_args()
    arms = chosen(arguments.arms, parser)
    try:
        found = list(measured(arms, arguments.prompts, arguments.tokens, Console(stderr=True)))
    except SlipstreamError as error:
        sys.exit(f"error: {error}")
    Console().print(wire_table(found))
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(one) for one in found], indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
