"""Runs the whole service in one thread on a port: API, router, drafter and target with toy models.

The models generate random bytes in instant steps, so thousands of requests take minutes.
"""

import asyncio
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import uvicorn

from actors.grammars import GrammarCompiler, grammar_vocabulary
from serve_app.api.metrics import Metrics
from tests.asgi_front import config_of, talking_codec, toy_api
from tests.integration.harness import cluster

MODEL = "toy"
CONTEXT = 96  # tokens; small, so that answers without a limit end soon
CODEC = talking_codec()
VOCABULARY = len(CODEC.tokenizer)
LOGITS = torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(6))


@dataclass(frozen=True)
class ToyServer:
    """Running toy server, with counters of what may leak."""

    listening: uvicorn.Server
    loop: asyncio.AbstractEventLoop
    metrics: Metrics

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.listening.servers[0].sockets[0].getsockname()[1]}"

    @property
    def tasks(self) -> int:
        return len(asyncio.all_tasks(self.loop))

    @property
    def connections(self) -> int:
        return len(self.listening.server_state.connections)

    @property
    def requests(self) -> float:
        """Number of running requests."""
        return self.metrics.registry.get_sample_value("slipstream_running_requests") or 0.0


@contextmanager
def toy_server(**server: Any) -> Iterator[ToyServer]:
    """Serves with the given `server` options. Fails if a session leaks resources."""
    started: Future[ToyServer] = Future()
    with ThreadPoolExecutor(1) as thread:
        serving = thread.submit(lambda: asyncio.run(_serve(started, server)))
        wait((started, serving), return_when=FIRST_COMPLETED)
        if serving.done():
            serving.result()
        toy = started.result()
        try:
            yield toy
        finally:
            toy.listening.should_exit = True
            serving.result()


async def _serve(started: "Future[ToyServer]", server: dict[str, Any]) -> None:
    grammars = GrammarCompiler(grammar_vocabulary(CODEC.tokenizer, CODEC.eos_ids))

    async with cluster(logits=LOGITS, grammars=grammars, lock_step=True) as c:
        c.hurry()
        metrics = Metrics()
        api = toy_api(c.router, CODEC, config_of(server, CONTEXT), metrics)
        listening = uvicorn.Server(uvicorn.Config(api, port=0, log_level="error", lifespan="off"))
        serving = asyncio.create_task(listening.serve())
        while not listening.started:
            await asyncio.sleep(0.01)
        started.set_result(ToyServer(listening, asyncio.get_running_loop(), metrics))
        await serving
