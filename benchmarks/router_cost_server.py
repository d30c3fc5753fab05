"""The server whose cost `router_cost.py` measures, by itself: prints its address, and serves until its input ends.

    PYTHONPATH=CHECKOUT python benchmarks/router_cost_server.py

It uses only what all checkouts since the first with an API have in common, and looks for each name where old ones and
new ones have it. So the checkout in PYTHONPATH is what is measured, whichever has this file.
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

SESSIONS = 64  # that the target serves at once
STEP_TOKENS = 4 * SESSIONS
ROOT = Path(harness.__file__).resolve().parents[2]
OURS = ("protos", "cluster", "actors", "serve_app", "tests")
CONTEXT = harness.CONTEXT
PAGES = SESSIONS * CONTEXT // getattr(harness, "PAGE_SIZE", 16)


def found(name: str, *modules: str) -> Any:
    """The first of these modules that the checkout has has the name."""
    for module in modules:
        if (ROOT / f"{module.replace('.', '/')}.py").exists():
            return getattr(import_module(module), name)
    raise ImportError(f"this checkout has none of {', '.join(modules)}")


def check_origin() -> None:
    """A package without an `__init__.py` may have modules of an installed checkout, which is not what is measured."""
    for name, module in sys.modules.items():
        file = getattr(module, "__file__", None)
        if name.partition(".")[0] in OURS and file is not None and not Path(file).is_relative_to(ROOT):
            raise ImportError(f"{name} is that of another checkout: {file}")


@asynccontextmanager
async def toy_cluster() -> AsyncIterator[Any]:
    """Configures one target and one drafter whose steps take no time; as large in each checkout."""
    known = inspect.signature(harness.cluster).parameters
    sizes = {"pages": PAGES, "sessions": SESSIONS}
    options: dict[str, Any] = {name: size for name, size in sizes.items() if name in known}
    if "sessions" not in known:
        enlarge_harness()
    if not hasattr(harness.Cluster, "hurry"):
        options["wrap_engine"] = lambda engine: engine  # else each step would be made to take as long as a model's
    async with harness.cluster(**options) as toy:
        if hasattr(toy, "hurry"):
            toy.hurry()
        yield toy


def enlarge_harness() -> None:
    """Configures a checkout whose harness takes no number of sessions."""
    for name in ("VerificationLimits", "VerifierLimits"):
        if hasattr(harness, name):
            setattr(harness, name, partial(_large, getattr(harness, name)))
    harness.SESSIONS = SESSIONS
    harness.PAGES = PAGES


def _large(limits: Callable[..., Any], *fields: Any, **named: Any) -> Any:
    return limits(*fields, **{**named, "max_step_tokens": STEP_TOKENS})


@asynccontextmanager
async def served() -> AsyncIterator[str]:
    """The API in front of the toy cluster; its address."""
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
        api = create_api(toy.router, codec, config, metrics, _never_asked)
        server = uvicorn.Server(uvicorn.Config(api, log_level="error", lifespan="off"))
        with socket.create_server(("127.0.0.1", 0), backlog=1024) as listening:  # who comes early waits in it
            serving = asyncio.create_task(server.serve([listening]))
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
            server.should_exit = True
            await serving


async def _never_asked() -> Any:
    """Nobody asks for the health of this server, and what it were to be differs by checkout."""
    raise NotImplementedError


async def serve_until_input_ends() -> None:
    async with served() as url:
        print(url, flush=True)
        await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(serve_until_input_ends())
