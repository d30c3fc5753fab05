"""Compares GPU step time with its memory-bandwidth floor, and measures the host time between steps.

    python benchmarks/gpu_engine.py [--model 8b 1b] [--context 512] [--json FILE]

Models have the shapes of Llama 3.1 8B and Llama 3.2 1B, random weights, and dtype bfloat16. The floor is the number of
bytes a step must read (all weights and cached keys and values, once each) divided by the copy bandwidth of the device.
The time between steps runs from the last operation of one forward pass to the first of the next, on the device's
clock; it includes decisions and their copy to the host. `--model tiny` also runs on CPUs, as a smoke test.
"""

import argparse
import json
import random
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from actors.attention.batch import RaggedBatch
from actors.attention.select_backend import AttentionReport, AttentionShape, attention_shape, choose_attention
from actors.engine.executor import StepExecutor
from actors.engine.runner import ModelRunner
from actors.models.decoder import Decoder, ForwardOutput
from cluster.verification.step import Row, StepPlan
from protos.draft_tree import DraftTree
from protos.messages import Acceptance, Open, Sampling

PAGE_SIZE = 16
ROWS = (1, 8, 32)
TOKENS = (1, 5)
COPIED_BYTES = 1 << 30
SHAPES: dict[str, dict[str, Any]] = {
    "8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "head_dim": 128},
    "1b": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "head_dim": 64},
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 16},
}
COMMON = {"vocab_size": 128_256, "num_attention_heads": 32, "num_key_value_heads": 8, "rope_theta": 500_000.0}
SMALL = {"vocab_size": 1000, "num_attention_heads": 4, "num_key_value_heads": 2}


@dataclass(frozen=True)
class Step:
    """Median times of one step shape."""

    model: str
    rows: int
    tokens_each: int
    context: int
    step_ms: float
    floor_ms: float
    between_ms: float

    @property
    def ratio(self) -> float:
        return self.step_ms / self.floor_ms


class Marks(Protocol):
    """Timestamps on the device's clock."""

    def mark(self) -> Any: ...

    def ms(self, before: Any, after: Any) -> float: ...


class GpuMarks:
    """Records CUDA events in the current stream."""

    def mark(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def ms(self, before: Any, after: Any) -> float:
        after.synchronize()
        return float(before.elapsed_time(after))


class CpuMarks:
    """Reads the host clock; CPU operations are synchronous."""

    def mark(self) -> Any:
        return time.perf_counter()

    def ms(self, before: Any, after: Any) -> float:
        return 1000 * (after - before)


class MarkedDecoder:
    """Wraps a runner's decoder and records the start and end of each forward pass on the device."""

    def __init__(self, decode: Decoder, marks: Marks) -> None:
        self._decode = decode
        self._marks = marks
        self.forwards: list[tuple[Any, Any]] = []

    def __call__(self, batch: RaggedBatch, layers: tuple[int, ...] = ()) -> ForwardOutput:
        began = self._marks.mark()
        output = self._decode(batch, layers)
        self.forwards.append((began, self._marks.mark()))
        return output


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def bytes_per_second(device: torch.device, size: int) -> float:
    """Returns the best bandwidth of ten copies, counting both reads and writes."""
    source, to = (torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2))
    best = float("inf")
    for _ in range(10):
        synchronize(device)
        began = time.perf_counter()
        to.copy_(source)
        synchronize(device)
        best = min(best, time.perf_counter() - began)
    return 2 * size / best


def random_model(name: str, device: torch.device) -> PreTrainedModel:
    """Creates a model with the architecture's default initialization, in bfloat16."""
    torch.manual_seed(0)
    common = SMALL if name == "tiny" else COMMON
    config = LlamaConfig(**common, **SHAPES[name], max_position_embeddings=8192, tie_word_embeddings=name == "1b")
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            return LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(before)


def read_bytes(model: PreTrainedModel, shape: AttentionShape, rows: int, end: int) -> int:
    """Returns the bytes a step must read: weights without an untied embedding, and `end` cached positions per row."""
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    if not model.config.tie_word_embeddings:
        embedding = model.get_input_embeddings().weight
        weights -= embedding.numel() * embedding.element_size()
    return weights + rows * end * shape.page_bytes // shape.page_size


def an_open(name: str, tokens: tuple[int, ...]) -> Open:
    return Open(
        session=name,
        attempt=1,
        tokens=tokens,
        prompt_len=len(tokens),
        max_len=len(tokens) + 1000,
        stop_ids=(),
        sampling=Sampling(temperature=0.0),
        seed=1,
        choice=0,
        hash_key=0,
        acceptance=Acceptance.COUPLED,
        draft_tokens=max(TOKENS) - 1,
    )


def measure(
    name: str, context: int, repeats: int, device: torch.device, bandwidth: float
) -> tuple[list[Step], AttentionReport]:
    """Measures all step shapes of a model."""
    model = random_model(name, device)
    shape = attention_shape(model, PAGE_SIZE)
    attention, report = choose_attention(shape, device)
    per_row = -(-(context + max(TOKENS)) // PAGE_SIZE)
    vocabulary = int(model.config.vocab_size)
    reads = {(rows, each): read_bytes(model, shape, rows, context + each) for rows in ROWS for each in TOKENS}
    runner = ModelRunner(model, per_row * max(ROWS), PAGE_SIZE, attention)
    marks: Marks = GpuMarks() if device.type == "cuda" else CpuMarks()
    decoder = MarkedDecoder(runner._decode, marks)
    runner._decode = decoder
    executor = StepExecutor(runner, vocabulary)
    drawn = random.Random(0)
    prompt = tuple(drawn.randrange(vocabulary) for _ in range(context))
    names = [str(row) for row in range(max(ROWS))]
    tables = {name: tuple(range(per_row * row, per_row * (row + 1))) for row, name in enumerate(names)}
    for session in names:
        row = Row(session, prompt, 0, False, tables[session])
        executor.step(StepPlan((), (an_open(session, prompt),), (row,)))
    found = []
    for each in TOKENS:
        fed = tuple(drawn.randrange(vocabulary) for _ in range(each))
        for count in ROWS:
            rows = tuple(Row(s, fed, context, True, tables[s], DraftTree.chain(fed[1:])) for s in names[:count])
            step_ms, between_ms = timed(executor, StepPlan((), (), rows), decoder, marks, repeats)
            floor_ms = 1000 * reads[count, each] / bandwidth
            found.append(Step(name, count, each, context, step_ms, floor_ms, between_ms))
    return found, report


def timed(
    executor: StepExecutor, plan: StepPlan, decoder: MarkedDecoder, marks: Marks, repeats: int
) -> tuple[float, float]:
    """Returns median milliseconds of a step, and of the gap between two forward passes."""
    for _ in range(3):
        executor.step(plan)
    decoder.forwards.clear()
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        executor.step(plan)  # returns once the decisions are on the host
        times.append(1000 * (time.perf_counter() - began))
    ends = zip(decoder.forwards, decoder.forwards[1:], strict=False)
    between = [marks.ms(first[1], second[0]) for first, second in ends]
    return statistics.median(times), statistics.median(between)


def show(console: Console, steps: list[Step], reports: dict[str, AttentionReport]) -> None:
    for model, report in reports.items():
        tried = [f"{t.name}: {f'{t.step_ms:.2f} ms' if t.step_ms is not None else t.refused}" for t in report.tried]
        console.print(f"{model}: attention by {report.chosen}", *tried, sep="\n  ", markup=False)
    table = Table("model", "rows", "tokens each", "context", "step, ms", "floor, ms", "ratio", "between steps, ms")
    for step in steps:
        times = (step.step_ms, step.floor_ms, step.ratio, step.between_ms)
        table.add_row(step.model, *map(str, (step.rows, step.tokens_each, step.context)), *(f"{t:.3f}" for t in times))
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SHAPES, nargs="+", default=["8b", "1b"])
    parser.add_argument("--context", type=int, default=512, help="cached tokens per row")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--json", type=Path, help="write all measurements here")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and set(arguments.model) != {"tiny"}:
        parser.error("torch finds no CUDA device; run on a GPU, or pass --model tiny for a smoke test")
    console = Console()
    bandwidth = bytes_per_second(device, COPIED_BYTES if device.type == "cuda" else COPIED_BYTES // 16)
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    console.print(f"{where}: a copy moves {bandwidth / 1e9:.0f} GB/s")
    steps: list[Step] = []
    reports: dict[str, AttentionReport] = {}
    for name in arguments.model:
        found, reports[name] = measure(name, arguments.context, arguments.repeats, device, bandwidth)
        steps += found
    show(console, steps, reports)
    if arguments.json:
        measured = {
            "device": where,
            "bytes_per_second": bandwidth,
            "attention": {name: asdict(report) for name, report in reports.items()},
            "steps": [asdict(step) for step in steps],
        }
        arguments.json.write_text(json.dumps(measured, indent=2))


if __name__ == "__main__":
    main()
