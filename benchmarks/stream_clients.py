"""Runs concurrent completion streams against a server; prints the elapsed seconds as JSON.

python benchmarks/stream_clients.py http://127.0.0.1:8000 '{"model": ...}' 64
"""

import asyncio
import json
import sys
import time

import httpx


async def ask_all(url: str, body: str, streams: int) -> float:
    """Returns the seconds from the first request to the end of the last answer."""
    limits = httpx.Limits(max_connections=None)
    headers = {"Content-Type": "application/json"}
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits, headers=headers, trust_env=False) as client:

        async def one() -> None:
            async with client.stream("POST", "/v1/completions", content=body) as response:
                response.raise_for_status()
                async for _ in response.aiter_raw():
                    pass

        began = time.perf_counter()
        await asyncio.gather(*(one() for _ in range(streams)))
        return time.perf_counter() - began


if __name__ == "__main__":
    print(json.dumps(asyncio.run(ask_all(sys.argv[1], sys.argv[2], int(sys.argv[3])))))
