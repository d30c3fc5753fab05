"""Runs the processes that `router_cost.py` measures, and serves until standard input closes.

    PYTHONPATH=CHECKOUT python benchmarks/router_cost_server.py peers
    PYTHONPATH=CHECKOUT python benchmarks/router_cost_server.py api '[["127.0.0.1:5001"], ["127.0.0.1:5002"]]'

`peers` runs a target and a drafter, and prints their addresses as JSON. `api` runs the router and the HTTP API for
these addresses, and prints its URL. PYTHONPATH selects the measured checkout, which may lack this file.
"""

import asyncio
import gc
import json
import socket
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import uvicorn

from cluster.audit import Audits
from cluster.config import AuditConfig, validated
from cluster.routing.membership import Endpoint, Members
from serve_app.api.metrics import Metrics
from serve_app.api.routes import ModelService, create_api
from serve_app.api.text import TextCodec
from serve_app.router import Router, RouterLimits
from tests.byte_tokenizer import byte_tokenizer
from tests.integration import harness
from tests.static_membership import StaticMembership

SESSIONS = 64  # concurrent sessions of the target
ROOT = Path(harness.__file__).resolve().parents[2]
OURS = ("protos", "cluster", "actors", "serve_app", "tests")
Addresses = Sequence[Sequence[str]]


def check_origin() -> None:
    """Raises ImportError if a package without `__init__.py` took modules from an installed checkout."""
    for name, module in sys.modules.items():
        file = getattr(module, "__file__", None)
        if name.partition(".")[0] in OURS and file is not None and not Path(file).is_relative_to(ROOT):
            raise ImportError(f"{name} comes from another checkout: {file}; uninstall that checkout")


@asynccontextmanager
async def peers() -> AsyncIterator[Addresses]:
    """Runs one target and one drafter whose steps take no time; yields their addresses."""
    pages = SESSIONS * harness.CONTEXT // harness.PAGE_SIZE
    async with harness.cluster(pages=pages, sessions=SESSIONS) as toy:
        toy.hurry()
        yield list(toy.targets), list(toy.drafters)


@asynccontextmanager
async def served(addresses: Addresses) -> AsyncIterator[str]:
    """Serves the API in front of these targets and drafters; yields its URL."""
    tokenizer = byte_tokenizer()
    codec = TextCodec(tokenizer, (tokenizer.eos_token_id,))
    config = validated(
        {
            "model": {"target": "toy", "max_context": harness.CONTEXT},
            "draft": {"method": "ngram"},
            "speculation": {"draft_tokens": 4},
        }
    )
    targets, drafters = [tuple([Endpoint(one, one) for one in pool]) for pool in addresses]
    audits = Audits(AuditConfig(), "float32", lambda _: None)
    membership = StaticMembership(Members(targets, drafters))
    router = Router(membership, harness.IDENTITY, RouterLimits(max_sessions=2 * SESSIONS, target_wait_s=5), audits)
    running = asyncio.create_task(router.run())
    api = create_api([ModelService(router, codec, config)], config, Metrics(), _unused_health)
    server = uvicorn.Server(uvicorn.Config(api, log_level="error", lifespan="off"))
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as listening:  # queues early connections
        serving = asyncio.create_task(server.serve([listening]))
        await harness.eventually(lambda: len(router.reachable) == len(targets + drafters), "the router reaches all")
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        server.should_exit = True
        await serving
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await router.close()


async def _unused_health() -> Any:
    """Replaces the health check, which no client calls."""
    raise NotImplementedError


async def serve_until_input_ends(kind: str, addresses: str = "") -> None:
    check_origin()
    async with peers() if kind == "peers" else served(json.loads(addresses)) as started:
        gc.collect()
        gc.freeze()
        print(json.dumps(started), flush=True)
        await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(serve_until_input_ends(*sys.argv[1:]))
