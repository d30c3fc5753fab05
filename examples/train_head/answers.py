"""Generates training data for a head with the target: answers to prompts, or whole dialogues.

    python -m examples.train_head.answers TARGET TOKENS.npz --prompts PROMPTS.jsonl [--tokens 256]
    python -m examples.train_head.answers TARGET TOKENS.npz --dialogues 1000

A line of PROMPTS is {"prompt": "..."} or {"messages": [{"role": ..., "content": ...}, ...]}. Without prompts, the
target writes whole dialogues from the opening of its chat template. A repeated call resumes an interrupted run.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.progress import Progress
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel

from actors.models.checkpoint import load_model, local_folder
from actors.models.tokenizer_reader import end_ids
from cluster.errors import ModelError
from examples.train_head.token_files import read_tokens, write_tokens

USER_TEXT = "\x00the user's words\x00"  # marks the user's text in the rendered template


def chat_ids(tokenizer: Any, messages: Sequence[dict[str, str]]) -> list[int]:
    """Returns the ids of a prompt, up to the answer's first token."""
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return list(tokenizer.encode(text, add_special_tokens=False))


def opening_ids(tokenizer: Any) -> list[int]:
    """Returns the ids that the chat template puts before the user's text."""
    messages = [{"role": "user", "content": USER_TEXT}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return list(tokenizer.encode(text.partition(USER_TEXT)[0], add_special_tokens=False))


def prompt_ids(tokenizer: Any, path: Path) -> list[list[int]]:
    """Reads the prompts of a file as token ids. Raises ModelError for a line with neither `prompt` nor `messages`."""
    found = []
    for number, line in enumerate(filter(None, path.read_text(encoding="utf-8").split("\n")), start=1):
        record = json.loads(line)
        if not isinstance(record, dict) or not {"prompt", "messages"} & record.keys():
            raise ModelError(f'{path}, line {number}: expected {{"prompt": ...}} or {{"messages": [...]}}')
        found.append(chat_ids(tokenizer, record.get("messages") or [{"role": "user", "content": record["prompt"]}]))
    return found


def temperatures(count: int, low: float, high: float) -> list[float]:
    """Returns `count` evenly spaced temperatures from `low` to `high`."""
    return [low + (high - low) * row / max(1, count - 1) for row in range(count)]


def draw(logits: Tensor, temperature: Tensor, top_k: int, generator: torch.Generator) -> Tensor:
    """Draws tokens, (rows,), from the top k of logits, (rows, vocabulary), at temperatures, (rows,)."""
    values, ids = logits.float().topk(min(top_k, logits.shape[-1]), dim=-1)
    chances = torch.softmax(values / temperature.clamp(min=1e-6)[:, None], dim=-1)
    chances[temperature == 0] = torch.nn.functional.one_hot(torch.tensor(0), chances.shape[-1]).to(chances)
    picks = torch.multinomial(chances, 1, generator=generator)
    return ids.gather(-1, picks)[:, 0]


@torch.inference_mode()
def written(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    temperature: Sequence[float],
    tokens: int,
    stops: Sequence[int],
    top_k: int,
    generator: torch.Generator,
) -> list[list[int]]:
    """Returns prompts with the target's answers, up to the token limit or through the first stop token."""
    longest = max(map(len, prompts))
    padding = torch.tensor([longest - len(prompt) for prompt in prompts], device=model.device)
    rows = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts], device=model.device)
    warmth = torch.tensor(temperature, device=model.device)
    is_over = torch.zeros(len(prompts), dtype=torch.bool, device=model.device)
    fed = rows
    cache = None
    for _ in range(tokens):
        columns = torch.arange(rows.shape[1], device=model.device)
        mask = (columns >= padding[:, None]).long()
        places = (columns[-fed.shape[1] :] - padding[:, None]).clamp(min=0)
        output = model(input_ids=fed, attention_mask=mask, position_ids=places, past_key_values=cache, logits_to_keep=1)
        cache = output.past_key_values
        fed = draw(output.logits[:, -1], warmth, top_k, generator)[:, None]
        rows = torch.cat([rows, fed], dim=-1)
        is_over |= torch.isin(fed[:, 0], torch.tensor(stops, device=model.device))
        if is_over.all():
            break
    return [_to_stop(row, longest, stops)[begin:] for row, begin in zip(rows.tolist(), padding.tolist(), strict=True)]


def _to_stop(row: list[int], start: int, stops: Sequence[int]) -> list[int]:
    end = next((place + 1 for place in range(start, len(row)) if row[place] in stops), len(row))
    return row[:end]


def batches(prompts: Sequence[list[int]], size: int) -> Iterator[list[list[int]]]:
    """Groups prompts of similar length, to limit padding."""
    ordered = sorted(prompts, key=len)
    yield from (ordered[first : first + size] for first in range(0, len(ordered), size))


def main(
    target: Annotated[str, typer.Argument(help="Folder or Hugging Face id.")],
    out: Annotated[Path, typer.Argument(help="File of token ids, .npz.")],
    prompts: Annotated[Path | None, typer.Option(help="JSON lines.")] = None,
    dialogues: Annotated[int, typer.Option(help="Number of dialogues to write without prompts.")] = 0,
    tokens: Annotated[int, typer.Option(help="Maximum tokens per answer or dialogue.")] = 256,
    low: Annotated[float, typer.Option(help="Lowest temperature in a batch.")] = 0.0,
    high: Annotated[float, typer.Option(help="Highest temperature in a batch.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Number of likeliest tokens to sample from.")] = 64,
    batch: Annotated[int, typer.Option(help="Rows per batch.")] = 32,
    dtype: Annotated[str, typer.Option(help="Dtype of the target.")] = "bfloat16",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    threads: Annotated[int, typer.Option(help="CPU threads.")] = 1,
    seed: Annotated[int, typer.Option()] = 0,
) -> None:
    """Generates training data with the target."""
    torch.set_num_threads(threads)
    folder = local_folder(target)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = load_model(folder, dtype, torch.device(device)).eval()
    asked = prompt_ids(tokenizer, prompts) if prompts else [opening_ids(tokenizer)] * dialogues
    if not asked:
        raise typer.BadParameter("no prompts; pass --prompts with a non-empty file, or --dialogues with a number")
    stops = end_ids(folder) if prompts else ()  # dialogues continue past end-of-turn tokens
    found = [list(map(int, sequence)) for sequence in read_tokens(out)] if out.is_file() else []
    with Progress() as progress:
        task = progress.add_task("sequences", total=len(asked), completed=len(found))
        done = 0
        for index, group in enumerate(batches(asked, batch)):
            done += len(group)
            if done <= len(found):
                continue
            generator = torch.Generator(device).manual_seed(seed + index)
            warmth = temperatures(len(group), low, high)
            found += written(model, group, warmth, tokens, stops, top_k, generator)
            write_tokens(out, found)
            progress.update(task, completed=len(found))


if __name__ == "__main__":
    typer.run(main)
