"""Measures the draft's agreement with the target's greedy choice, on held-out prompts.

The target continues each prompt greedily. One teacher-forced pass of the draft over prompt and continuation then shows
the acceptance at every position. At temperature 0, the agreement is the acceptance rate of a single draft token, and
the matched positions determine the tokens per verification for every draft length.

With `--lookup N`, a repetition of at least N tokens proposes the token after its earlier occurrence; the draft predicts
elsewhere.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from target import ChatFrame, TargetSource, end_of_turn_ids
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from actors.drafters.model.recurrent_head import FILE
from actors.learning.recurrent_head import TrainableRecurrentHead

DEFAULT_PROMPTS = Path(__file__).with_name("heldout_prompts.jsonl")
ALL_KINDS = "all"
BLOCK_LENGTHS = (1, 2, 3, 4, 5)
Matches = list[list[bool]]  # by tokens ahead, then by the block's start position


@dataclass(frozen=True)
class Continuation:
    """Held-out prompt with the target's greedy answer."""

    kind: str
    prompt_ids: list[int]
    answer_ids: list[int]


@dataclass(frozen=True)
class Score:
    """Agreement and tokens per verification for one kind of prompt."""

    positions: int
    agreement: float
    tokens_per_verify: dict[int, float]  # by draft length K


def read_prompts(path: Path) -> list[tuple[str, str]]:
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]
    return [(row["kind"], row["prompt"]) for row in rows]


@torch.inference_mode()
def continue_greedily(source: TargetSource, prompts: list[tuple[str, str]], tokens: int) -> list[Continuation]:
    """Returns the target's answers at temperature 0, computed in float32 one prompt at a time."""
    tokenizer = source.load_tokenizer()
    model = source.load_model(torch.float32)
    frame = ChatFrame.of(tokenizer)
    ends = end_of_turn_ids(model)
    continuations = []
    for kind, text in track(prompts, "target", console=Console(stderr=True)):
        prompt_ids = frame.prompt(tokenizer, text)
        continuations.append(Continuation(kind, prompt_ids, greedy_answer(model, prompt_ids, ends, tokens)))
    return continuations


def greedy_answer(model: PreTrainedModel, prompt_ids: list[int], ends: frozenset[int], tokens: int) -> list[int]:
    cache = DynamicCache(config=model.config)
    fed = torch.tensor([prompt_ids])
    answer = list[int]()
    while len(answer) < tokens and not ends.intersection(answer[-1:]):
        logits = model(input_ids=fed, past_key_values=cache, logits_to_keep=1).logits
        answer.append(int(logits[0, -1].argmax()))
        fed = torch.tensor([answer[-1:]])
    return answer


def load_or_continue(path: Path | None, make: Callable[[], list[Continuation]]) -> list[Continuation]:
    """Reads continuations from `path`, or makes and stores them; they do not depend on the draft."""
    if path and path.exists():
        return [Continuation(**row) for row in json.loads(path.read_text(encoding="utf-8"))]
    continuations = make()
    if path:
        path.write_text(json.dumps([asdict(c) for c in continuations]), encoding="utf-8")
    return continuations


@torch.inference_mode()
def matches(
    draft: PreTrainedModel, head: TrainableRecurrentHead | None, continuation: Continuation, lookup: int
) -> Matches:
    """Returns whether each prediction equals the target's token, by tokens ahead and position in the answer."""
    prompt = continuation.prompt_ids
    answer = continuation.answer_ids
    tokens = prompt + answer
    output = draft(input_ids=torch.tensor([tokens]), output_hidden_states=True)
    named = [output.logits[0, len(prompt) - 1 : -1].argmax(dim=-1)]
    state = output.hidden_states[-1][0, len(prompt) - 1 : -1]
    taken = torch.tensor(answer)
    for further in range(1, draft.config.tokens_per_forward if head else 1):
        state = head(state[:-1], draft.get_input_embeddings()(taken[further - 1 : -1]))
        named.append(draft.get_output_embeddings()(state).argmax(dim=-1))
    matched = [(row == taken[at:]).tolist() for at, row in enumerate(named)]
    if lookup:
        for index in range(len(answer)):
            found = look_up(tokens[: len(prompt) + index], lookup)
            matched[0][index] = matched[0][index] if found is None else found == answer[index]
    return matched


def look_up(tokens: list[int], shortest: int, longest: int = 4) -> int | None:
    """Returns the token after the latest earlier occurrence of the longest repeated suffix, or None.

    The suffix has between `shortest` and `longest` tokens.
    """
    for length in range(longest, shortest - 1, -1):
        last = tokens[-length:]
        for start in range(len(tokens) - length - 1, -1, -1):
            if tokens[start : start + length] == last:
                return tokens[start + length]
    return None


def verifies_needed(matched: Matches, block_length: int) -> int:
    """Returns the number of draft rounds of `block_length` tokens until the answer is complete."""
    position = rounds = 0
    while position < len(matched[0]):
        accepted = 0
        while accepted < block_length:
            further = accepted % len(matched)
            begin = position + accepted - further
            if begin >= len(matched[further]) or not matched[further][begin]:
                break
            accepted += 1
        position += accepted + 1
        rounds += 1
    return rounds


def score(answers: list[Matches]) -> Score:
    positions = sum(len(matched[0]) for matched in answers)
    lengths = {k: positions / sum(verifies_needed(a, k) for a in answers) for k in BLOCK_LENGTHS}
    return Score(positions, sum(sum(matched[0]) for matched in answers) / positions, lengths)


def evaluate(
    draft: PreTrainedModel, head: TrainableRecurrentHead | None, continuations: Iterable[Continuation], lookup: int = 0
) -> dict[str, Score]:
    """Returns scores by kind of prompt, and for all kinds together."""
    by_kind: dict[str, list[Matches]] = defaultdict(list)
    for continuation in continuations:
        matched = matches(draft, head, continuation, lookup)
        by_kind[continuation.kind].append(matched)
        by_kind[ALL_KINDS].append(matched)
    return {kind: score(by_kind[kind]) for kind in sorted(by_kind, key=lambda k: (k == ALL_KINDS, k))}


@torch.inference_mode()
def step_ms(model: PreTrainedModel, context: int = 60, steps: int = 30) -> float:
    """Returns the median milliseconds of a one-token forward pass after `context` tokens."""
    cache = DynamicCache(config=model.config)
    model(input_ids=torch.ones((1, context), dtype=torch.long), past_key_values=cache)
    times = []
    for _ in range(steps):
        start = time.perf_counter()
        model(input_ids=torch.ones((1, 1), dtype=torch.long), past_key_values=cache)
        times.append(1000 * (time.perf_counter() - start))
    return sorted(times)[steps // 2]


def table_of(scores: dict[str, Score]) -> Table:
    table = Table("kind", "positions", "agreement", *(f"K = {k}" for k in BLOCK_LENGTHS))
    for kind, row in scores.items():
        lengths = (f"{row.tokens_per_verify[k]:.2f}" for k in BLOCK_LENGTHS)
        table.add_row(kind, str(row.positions), f"{row.agreement:.3f}", *lengths)
    return table


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("target", help="Hugging Face folder or id")
    parser.add_argument("draft", help="Hugging Face folder or id")
    parser.add_argument("--gguf-file", help="name of the GGUF file inside TARGET")
    parser.add_argument("--prompts", type=Path, default=DEFAULT_PROMPTS, help="JSON lines with kind and prompt")
    parser.add_argument("--tokens", type=int, default=96, help="maximum tokens per continuation")
    parser.add_argument("--continuations", type=Path, help="cache file for the target's continuations")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    parser.add_argument("--lookup", type=int, default=0, help="copy after this many repeated tokens; 0: never")
    parser.add_argument("--without-head", action="store_true", help="ignore the draft's recurrent head")
    parser.add_argument("--time", action="store_true", help="also time a one-token forward pass in bfloat16")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    source = TargetSource(arguments.target, arguments.gguf_file)
    continuations = load_or_continue(
        arguments.continuations,
        lambda: continue_greedily(source, read_prompts(arguments.prompts), arguments.tokens),
    )
    draft = AutoModelForCausalLM.from_pretrained(arguments.draft, dtype=torch.bfloat16).eval()
    folder = Path(arguments.draft)
    console = Console()
    has_head = (folder / FILE).exists() and not arguments.without_head
    head = TrainableRecurrentHead.load(folder).to(torch.bfloat16) if has_head else None
    console.print(table_of(evaluate(draft, head, continuations, arguments.lookup)))
    if arguments.time:
        target_ms = step_ms(source.load_model(torch.bfloat16))
        draft_ms = step_ms(draft)
        console.print(f"one token, {arguments.threads} thread(s): target {target_ms:.1f} ms, draft {draft_ms:.1f} ms")


if __name__ == "__main__":
    main()
