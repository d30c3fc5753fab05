"""Measures a head's tokens per verification and drafting time per block, for several draft lengths at temperature 0.

    python -m examples.train_head.evaluate TARGET HEAD PROMPTS.jsonl [--method eagle] [--compare CONFIG.yaml]

Runs one session after another in the reference loop, with the real schedulers, engine and method but no network.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table
from transformers import AutoTokenizer, PreTrainedModel

from actors.compute.hidden_states import StateCapture
from actors.drafters.registry import DraftSetup, capture_spec, create_method, states_format
from actors.engine.executor import StepExecutor
from actors.engine.runner import ModelRunner
from actors.models.checkpoint import load_model, local_folder, vocabulary
from actors.models.tokenizer_reader import end_ids
from cluster.config import DraftPool, load_config
from cluster.drafting.method import DraftingMethod
from cluster.drafting.requests import Proposal
from cluster.drafting.scheduler import DraftScheduler
from cluster.drafting.session_table import DrafterLimits
from cluster.reference_loop import lock_step
from cluster.routing.ledger import CommittedTokens, Generation, Session
from cluster.speculation.controller import LockStep
from cluster.verification.scheduler import VerificationLimits, VerificationScheduler
from examples.train_head.answers import prompt_ids
from protos.messages import Acceptance, DraftRequest, Sampling

CPU = torch.device("cpu")
CONTEXT = 1024
PAGE_SIZE = 16
PAGES = CONTEXT // PAGE_SIZE
MAX_BLOCK = 16


class TimedMethod:
    """Wraps a drafting method and records the seconds of each call that drafts."""

    def __init__(self, method: DraftingMethod) -> None:
        self.seconds: list[float] = []
        self._method = method

    def draft(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        started = time.perf_counter()
        found = self._method.draft(requests)
        if requests:
            self.seconds.append(time.perf_counter() - started)
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._method, name)


@dataclass(frozen=True, slots=True)
class Drafted:
    """Results for one draft length."""

    draft_tokens: int
    tokens_a_verify: float
    first_right: float  # share of blocks whose first token was accepted
    block_ms: float  # median time of a block
    answers: list[list[int]]  # token ids by prompt; independent of the drafts


class Pair:
    """Target with a drafting method."""

    def __init__(self, folder: Path, model: PreTrainedModel, draft: DraftPool, dtype: str) -> None:
        self._draft = draft
        self._layout = states_format(draft, folder)
        self._stops = end_ids(folder)
        self._setup = DraftSetup(dtype, CONTEXT, MAX_BLOCK, vocabulary(folder), str(folder), self._layout)
        spec = capture_spec(draft, folder, dtype)
        capture = None if spec is None else StateCapture(spec, PAGES, PAGE_SIZE, CPU, spec.projection_on(CPU))
        self._runner = ModelRunner(model, PAGES, PAGE_SIZE, capture=capture)

    @torch.inference_mode()
    def run(self, prompts: Sequence[Sequence[int]], draft_tokens: int, tokens: int) -> Drafted:
        """Answers all prompts in sequence, each with at most `tokens` tokens."""
        method = TimedMethod(create_method(self._draft, self._setup))
        rounds = [self._rounds(method, index, prompt, draft_tokens, tokens) for index, prompt in enumerate(prompts)]
        emits = [emit for answer in rounds for emit in answer]
        return Drafted(
            draft_tokens=draft_tokens,
            tokens_a_verify=sum(len(emit.tokens) for emit in emits) / len(emits),
            first_right=sum(emit.accepted > 0 for emit in emits) / len(emits),
            block_ms=1e3 * median(method.seconds),
            answers=[[token for emit in answer for token in emit.tokens] for answer in rounds],
        )

    def _rounds(
        self, method: Any, index: int, prompt: Sequence[int], draft_tokens: int, tokens: int
    ) -> list[CommittedTokens]:
        rows = self._runner.vocabulary
        limits = VerificationLimits(rows, CONTEXT, 1, 512, PAGES, PAGE_SIZE, trees=False, states=self._layout)
        target = VerificationScheduler(limits, LockStep())
        drafter = DraftScheduler(DrafterLimits(rows, CONTEXT, 1, self._layout), draft_ahead=False)
        generation = Generation(
            session=f"s{index}",
            prompt=tuple(prompt),
            max_len=len(prompt) + tokens,
            stop_ids=self._stops,
            sampling=Sampling(temperature=0.0),
            seed=index,
            draft_seed=index,
            choice=0,
            hash_key=1,
            acceptance=Acceptance.COUPLED,
            draft_tokens=draft_tokens,
        )
        executor = StepExecutor(self._runner, rows)
        return list(lock_step(Session(generation), drafter, method, target, executor))


def main(
    target: Annotated[str, typer.Argument(help="Folder or Hugging Face id.")],
    head: Annotated[str, typer.Argument(help="Folder of the head.")],
    prompts: Annotated[Path, typer.Argument(help="JSON lines, in the format of examples.train_head.answers.")],
    method: Annotated[str, typer.Option(help="Drafting method of the head.")] = "eagle",
    compare: Annotated[Path | None, typer.Option(help="Configuration of another draft to compare with.")] = None,
    first: Annotated[int | None, typer.Option(help="Number of prompts; by default all.")] = None,
    draft_tokens: Annotated[list[int] | None, typer.Option(help="Draft lengths; by default 1 to 5.")] = None,
    block_len: Annotated[list[int] | None, typer.Option(hidden=True)] = None,  # earlier name of --draft-tokens
    tokens: Annotated[int, typer.Option(help="Maximum tokens per answer.")] = 64,
    dtype: Annotated[str, typer.Option(help="Dtype of both models.")] = "bfloat16",
    threads: Annotated[int, typer.Option(help="CPU threads.")] = 1,
) -> None:
    """Measures a head's drafts."""
    torch.set_num_threads(threads)
    folder = local_folder(target)
    model = load_model(folder, dtype, CPU)
    texts = prompt_ids(AutoTokenizer.from_pretrained(folder), prompts)[:first]
    options: dict[str, Any] = {"method": method, "model": head}
    drafts = [DraftPool(**options), *([] if compare is None else [load_config(compare).draft])]
    sheet = Table("draft", "block", "tokens a verify", "first right", "ms a block")
    for draft in drafts:
        pair = Pair(folder, model, draft, dtype)
        for length in track(draft_tokens or block_len or range(1, 6), description=draft.method):
            found = pair.run(texts, length, tokens)
            sheet.add_row(
                f"{draft.method} {Path(draft.model or '').name}",
                str(length),
                f"{found.tokens_a_verify:.3f}",
                f"{found.first_right:.3f}",
                f"{found.block_ms:.2f}",
            )
    Console().print(sheet)


if __name__ == "__main__":
    typer.run(main)
