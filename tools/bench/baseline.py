"""Reference arm of the bench: Hugging Face `generate` in a separate process.

The first input line names the model to load. The process then reads one JSON line per question and writes one JSON line
per answer. It is idle between questions.
"""

import asyncio
import json
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cluster.config import Resources, SlipstreamConfig
from cluster.errors import ModelError
from serve_app.endpoint_client import ChatQuestion, TimedAnswer

LINE_BYTES = 16 << 20


class Reference:
    """Client of the reference process."""

    def __init__(self, process: Process) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._stdin = process.stdin
        self._stdout = process.stdout

    @classmethod
    @asynccontextmanager
    async def started(cls, config: SlipstreamConfig) -> AsyncIterator["Reference"]:
        """Starts the process and loads the target, with the total cores and threads of a replica's ranks."""
        command = sys.executable, "-m", "tools.bench.baseline"
        process = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE, limit=LINE_BYTES)
        reference = cls(process)
        try:
            per_rank = config.target.resources_per_rank
            ranks = config.target.tensor_parallel
            resources = per_rank.model_copy(update={"threads": per_rank.threads * ranks})
            model = {"target": config.model.target, "dtype": config.model.dtype}
            await reference._exchange({**model, "resources": resources.model_dump()})
            yield reference
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()

    async def ask(self, question: ChatQuestion) -> TimedAnswer:
        """Returns a greedy answer."""
        assert question.temperature == 0, "the reference decodes greedily"
        return TimedAnswer(**await self._exchange(asdict(question)))

    async def _exchange(self, message: dict[str, Any]) -> dict[str, Any]:
        self._stdin.write(json.dumps(message).encode() + b"\n")
        await self._stdin.drain()
        line = await self._stdout.readline()
        if not line:
            raise ModelError("the reference process ended; see its output above")
        reply: dict[str, Any] = json.loads(line)
        return reply


def main() -> None:
    """Loads the model and answers questions; runs in the reference process."""
    from actors.engine.process import device_of, use_cpu
    from actors.models.checkpoint import load_model, local_folder
    from serve_app.api.text import TextCodec

    replies = sys.stdout  # keeps output printed by libraries out of the replies
    sys.stdout = sys.stderr
    setup = json.loads(sys.stdin.readline())
    resources = Resources.model_validate(setup["resources"])
    use_cpu(resources)
    folder: Path = local_folder(setup["target"])
    model = load_model(folder, setup["dtype"], device_of(resources))
    codec = TextCodec.load(folder)
    print(json.dumps({"loaded": str(folder)}), file=replies, flush=True)
    for line in sys.stdin:
        answer = _generate(model, codec, ChatQuestion(**json.loads(line)))
        print(json.dumps(asdict(answer)), file=replies, flush=True)


def _generate(model: Any, codec: Any, question: ChatQuestion) -> TimedAnswer:
    import torch
    from transformers.generation.streamers import BaseStreamer

    class Stopwatch(BaseStreamer):  # type: ignore[misc]
        """Receives the prompt, then each token, and records the arrival times."""

        def __init__(self) -> None:
            self.token_times_s: list[float] = []

        def put(self, value: Any) -> None:
            self.token_times_s.append(time.perf_counter())

        def end(self) -> None:
            pass

    started = time.perf_counter()
    stopwatch = Stopwatch()
    detokenizer = codec.detokenizer()
    prompt = torch.tensor([codec.encode_chat(question.messages)], device=model.device)
    with torch.inference_mode():
        tokens = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            max_new_tokens=question.max_tokens,
            eos_token_id=None if question.ignore_eos else list(codec.eos_ids),
            streamer=stopwatch,
        )[0, prompt.shape[1] :].tolist()
    text = "".join([*map(detokenizer.push, tokens), detokenizer.finish()])
    latency_s = time.perf_counter() - started
    return TimedAnswer(text, len(tokens), 0, 0, first_token_s=stopwatch.token_times_s[1] - started, latency_s=latency_s)


if __name__ == "__main__":
    main()
