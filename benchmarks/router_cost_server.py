"""Runs the server that `router_cost.py` measures: prints its address and serves until its standard input closes.

    PYTHONPATH=CHECKOUT python benchmarks/router_cost_server.py

PYTHONPATH selects the measured checkout, which may lack this file. The server uses only interfaces common to all
checkouts since the first API, and looks each name up in its old and new modules.
"""

import asyncio
import inspect
import socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import uvicorn

from cluster.config import validated
from tests.byte_tokenizer import byte_tokenizer
from tests.integration import harness

SESSIONS = 64  # concurrent sessions of the target
STEP_TOKENS = 4 * SESSIONS
ROOT = Path(harness.__file__).resolve().parents[2]
OURS = ("protos", "cluster", "actors", "serve_app", "tests")
CONTEXT = harness.CONTEXT
PAGES = SESSIONS * CONTEXT // getattr(harness, "PAGE_SIZE", 16)


def found(name: str, *modules: str) -> Any:
    """Returns the named object from the first of `modules` that the checkout contains."""
    for module in modules:
        if (ROOT / f"{module.replace('.', '/')}.py").exists():
            return getattr(import_module(module), name)
    raise ImportError(f"this checkout has none of {', '.join(modules)}; it is too old to measure")


def check_origin() -> None:
    """Raises ImportError if a package without `__init__.py` took modules from an installed checkout."""
    for name, module in sys.modules.items():
        file = getattr(module, "__file__", None)
        if name.partition(".")[0] in OURS and file is not None and not Path(file).is_relative_to(ROOT):
            raise ImportError(f"{name} comes from another checkout: {file}; uninstall that checkout")


@asynccontextmanager
async def toy_cluster() -> AsyncIterator[Any]:
    """Runs one target and one drafter whose steps take no time, with the same sizes in every checkout."""
    known = inspect.signature(harness.cluster).parameters
    sizes = {"pages": PAGES, "sessions": SESSIONS}
    options: dict[str, Any] = {name: size for name, size in sizes.items() if name in known}
    if "sessions" not in known:
        add_harness_load()
    if not hasattr(harness.Cluster, "hurry"):
        options["wrap_engine"] = lambda engine: engine  # the default wrapper delays each step by a model's step time
    async with harness.cluster(**options) as toy:
        if hasattr(toy, "hurry"):
            toy.hurry()
        yield toy


def add_harness_load() -> None:
    """Enlarges the harness of a checkout whose `cluster` has no `sessions` parameter."""
    for name in ("VerificationLimits", "VerifierLimits"):
        if hasattr(harness, name):
            setattr(harness, name, partial(_large, getattr(harness, name)))
    harness.SESSIONS = SESSIONS
    harness.PAGES = PAGES


def _large(limits: Callable[..., Any], *fields: Any, **named: Any) -> Any:
    return limits(*fields, **{**named, "max_step_tokens": STEP_TOKENS})


@asynccontextmanager
async def served() -> AsyncIterator[str]:
    """Serves the API of the toy cluster; yields its URL."""
    create_api = found("create_api", "serve_app.api.routes", "serve_app.api.app", "serve_app.api")
    metrics = found("Metrics", "serve_app.api.metrics", "serve_app.metrics")()
    codec_of = found("TextCodec", "serve_app.api.text", "serve_app.text")
    check_origin()
    tokenizer = byte_tokenizer()
    config = validated(
        {
            "model": {"target": "toy", "max_context": CONTEXT},
            "draft": {"method": "ngram"},
            "speculation": {"draft_tokens": 4},
        }
    )
    async with toy_cluster() as toy:
        codec = codec_of(tokenizer, (tokenizer.eos_token_id,))
        api = create_api(toy.router, codec, config, metrics, _unused_receive)
        server = uvicorn.Server(uvicorn.Config(api, log_level="error", lifespan="off"))
        with socket.create_server(("127.0.0.1", 0), backlog=1024) as listening:  # queues early connections
            serving = asyncio.create_task(server.serve([listening]))
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
            server.should_exit = True
            await serving


async def _unused_receive() -> Any:
    """Replaces the health check, which no client calls and whose signature differs by checkout."""
    raise NotImplementedError


async def serve_until_input_ends() -> None:
    async with served() as url:
        print(url, flush=True)
        await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(serve_until_input_ends())
