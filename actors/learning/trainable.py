"""A draft model with trainable weights, and the batches on which it is trained and scored.

Training and evaluation share one forward: float32, teacher-forced, with logits only at the positions of answers, and
only for the tokens that the draft may propose (`frequent_tokens.json`). On a small draft the LM head over the whole
vocabulary would dominate the cost.

Measured on one core of an AMD EPYC (AVX2): float32 is the fastest dtype. Attention by two batched matrix products is
faster than the fused kernel for rows of up to some hundred tokens. Computing the loss and its gradient together, one
slice of positions at a time, avoids writing and reading all logits twice.
"""

import hashlib
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from actors.drafters.loading import HEAD_TOKENS
from actors.drafters.model.forwards import read_frequent_tokens, read_mask_tokens, tokens_per_forward
from actors.drafters.model.recurrent_head import FILE as RECURRENT_HEAD
from actors.drafters.model.recurrent_head import load_recurrent_head
from actors.learning.recurrent_head import TrainableRecurrentHead
from actors.learning.versions import MANIFEST
from actors.models.checkpoint import is_snapshot, load_model
from actors.models.decoder import is_llama_kind
from actors.models.layer_subset import context_length
from actors.models.weights import INDEX, SINGLE, stored_tensors
from cluster.errors import ModelError
from cluster.learning import Example
from protos.frozen import value

POSITIONS_AT_ONCE = 256  # positions per slice of logits
ATTENTION = "slipstream_training"
WEIGHT_SUFFIXES = frozenset({".safetensors", ".bin", ".pt", ".pth"})
FUSED_FROM = 512  # tokens per row; storing the scores of longer rows takes too much memory


@dataclass(frozen=True, slots=True)
class RowLimits:
    """Limits of the rows into which examples are cut, in tokens.

    A prompt is cut from the left. A longer answer becomes several rows, each preceded by the end of the text before it.
    """

    prompt_tokens: int = 512
    answer_tokens: int = 256

    def within(self, positions: int | None) -> "RowLimits":
        """Returns limits for rows that a model with `positions` positions can read."""
        if positions is None or self.prompt_tokens + self.answer_tokens <= positions:
            return self
        answer = max(1, min(self.answer_tokens, positions // 2))
        return RowLimits(max(1, positions - answer), answer)


@value
class Row:
    """A part of an example: its tokens, and how many of the last ones are predicted.

    The last token is only predicted; the others are fed.
    """

    tokens: tuple[int, ...]
    predicted: int
    session: str = ""  # session with the hidden states of these tokens, for heads
    first: int = 0  # position of the first token in the example


def rows_of(example: Example, limits: RowLimits) -> list[Row]:
    """Cuts an example into rows; none for an empty answer. The first token of a text cannot be predicted."""
    text = (*example.prompt, *example.answer)
    found = []
    for first in range(len(example.prompt), len(text), limits.answer_tokens):
        end = min(first + limits.answer_tokens, len(text))
        tokens = text[max(0, first - limits.prompt_tokens) : end]
        predicted = min(end - first, len(tokens) - 1)
        if predicted:
            found.append(Row(tokens, predicted))
    return found


def check_tokens(example: Example, vocabulary: int) -> None:
    """Raises ModelError if the example has a token outside a draft's vocabulary."""
    if unknown := [token for token in (*example.prompt, *example.answer) if not 0 <= token < vocabulary]:
        raise ModelError(
            f"an example has token {unknown[0]}, but the draft's vocabulary has {vocabulary} tokens; train on examples"
            " of the draft's own target"
        )


@dataclass(frozen=True, slots=True)
class Pass:
    """Rows of one forward, padded at the end; predicted positions of all rows are concatenated."""

    tokens: Tensor  # (rows, longest row): tokens to feed
    rows: Tensor  # (positions,): row of each predicted position
    columns: Tensor  # (positions,): index in its row of the last token fed before it
    labels: Tensor  # (positions,): token ids
    remaining: Tensor  # (positions,): number of later predicted positions in the same row
    sizes: tuple[int, ...]  # number of predicted positions per row


def collate(rows: Sequence[Row], device: torch.device) -> Pass:
    """Pads rows to the same length."""
    longest = max(len(row.tokens) for row in rows) - 1
    tokens = np.zeros((len(rows), longest), np.int64)
    for index, row in enumerate(rows):
        tokens[index, : len(row.tokens) - 1] = row.tokens[:-1]
    sizes = tuple(row.predicted for row in rows)
    columns = [np.arange(len(row.tokens) - 1 - row.predicted, len(row.tokens) - 1) for row in rows]
    labels = [np.array(row.tokens[-row.predicted :], np.int64) for row in rows]
    remaining = [np.arange(size - 1, -1, -1) for size in sizes]

    def put(values: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(values).to(device)

    return Pass(
        put(tokens),
        put(np.repeat(np.arange(len(rows)), sizes)),
        put(np.concatenate(columns)),
        put(np.concatenate(labels)),
        put(np.concatenate(remaining)),
        sizes,
    )


def grouped(rows: Sequence[Row], pass_tokens: int) -> Iterator[list[int]]:
    """Yields indices of rows of similar length: at most `pass_tokens` tokens with padding, or a single row."""
    group: list[int] = []
    for index in sorted(range(len(rows)), key=lambda index: -len(rows[index].tokens)):
        if group and (len(group) + 1) * (len(rows[group[0]].tokens) - 1) > pass_tokens:
            yield group
            group = []
        group.append(index)
    if group:
        yield group


# ---------------------------------------------------------------- model


Embed = Callable[[Tensor], Tensor]
"""Maps token ids, (...), to input embeddings, (..., hidden)."""


class TrainableDraft(nn.Module):
    """A draft model in float32 and, if its folder has one, its recurrent head.

    `columns`, (tokens,), are the token ids that it proposes; None: all. `column_of`, (vocabulary,), is the inverse,
    with -1 for tokens that are never proposed. The head chooses among the first `head_columns` columns.
    """

    columns: Tensor | None
    column_of: Tensor

    def __init__(
        self,
        model: PreTrainedModel,
        head: TrainableRecurrentHead | None,
        columns: Sequence[int] | None,
        width: int,
    ) -> None:
        super().__init__()
        self.model = model
        self.head = head
        self.width = width if head is not None else 1  # tokens predicted per forward
        self.vocabulary = int(model.config.vocab_size)
        proposed = range(self.vocabulary) if columns is None else columns
        column_of = torch.full((self.vocabulary,), -1)
        column_of[list(proposed)] = torch.arange(len(proposed))
        self.head_columns = len(proposed) if columns is None else min(len(proposed), HEAD_TOKENS)
        self.register_buffer("columns", None if columns is None else torch.tensor(columns), persistent=False)
        self.register_buffer("column_of", column_of, persistent=False)
        self.to(model.device)

    @property
    def device(self) -> torch.device:
        return self.column_of.device

    @property
    def lm_head(self) -> Tensor:
        """LM head weights of the tokens that the draft proposes, (columns, hidden)."""
        weight: Tensor = self.model.get_output_embeddings().weight
        return weight if self.columns is None else F.embedding(self.columns, weight)

    def states(self, batch: Pass, embed: "Embed | None" = None) -> Tensor:
        """Returns the hidden states that predict the answers' tokens, (positions, hidden)."""
        inputs = (embed or self.embed)(batch.tokens)
        hidden: Tensor = self.model.get_decoder()(inputs_embeds=inputs, use_cache=False).last_hidden_state
        return hidden[batch.rows, batch.columns]

    def embed(self, tokens: Tensor) -> Tensor:
        """Returns the input embeddings of tokens, (..., hidden)."""
        embedded: Tensor = self.model.get_input_embeddings()(tokens)
        return embedded

    def following(self, states: Tensor, tokens: Tensor, embed: "Embed | None" = None) -> Tensor:
        """Returns the recurrent head's states after `tokens`, (tokens,), which were sampled from `states`."""
        assert self.head is not None, "only a draft with a recurrent head predicts further tokens"
        found: Tensor = self.head(states, (embed or self.embed)(tokens))
        return found

    def rows(self, examples: Iterable[Example], limits: RowLimits) -> list[list[Row]]:
        """Cuts examples into rows that the model can read. Raises ModelError for ids outside its vocabulary."""
        limits = limits.within(context_length(self.model.config))
        found = []
        for example in examples:
            check_tokens(example, self.vocabulary)
            found.append(rows_of(example, limits))
        return found


class VocabularyRows:
    """The rows of embedding and LM head used in one step, with separate gradients.

    Gradients over the whole vocabulary for each lookup and pass would take a quarter of a step's time.
    """

    def __init__(self, draft: TrainableDraft, tokens: Tensor) -> None:
        """Gathers the rows. `tokens`, of any shape, must include all tokens that the step embeds."""
        self._ids = torch.unique(tokens)
        self._gathered = (draft.lm_head, draft.embed(self._ids))
        self.lm_head, self._embedding = (rows.detach().requires_grad_(True) for rows in self._gathered)

    def embed(self, tokens: Tensor) -> Tensor:
        """Returns the input embeddings of tokens, (..., hidden)."""
        return F.embedding(torch.searchsorted(self._ids, tokens), self._embedding)

    def backward(self) -> None:
        """Adds this step's gradients to those of the draft's weights."""
        torch.autograd.backward(self._gathered, (self.lm_head.grad, self._embedding.grad))


def diverged(step: int, what: str) -> ModelError:
    return ModelError(f"training diverged at step {step}: {what}; lower draft.learning.learning_rate")


def load_trainable(folder: Path, device: torch.device) -> TrainableDraft:
    """Loads a Llama-like draft checkpoint for training.

    Raises ModelError if the checkpoint cannot be loaded, or its kind cannot be trained.
    """
    model = load_model(folder, "float32", device)
    output = model.get_output_embeddings()
    if not is_llama_kind(model) or output.bias is not None or getattr(model.config, "logit_scale", None):
        raise ModelError(
            f"{folder} holds a {type(model).__name__}, which cannot be trained; use a draft model with the"
            " Llama architecture"
        )
    columns = read_frequent_tokens(folder, int(model.config.vocab_size))
    width = tokens_per_forward(model.config, 1)
    head = None
    if load_recurrent_head(folder, model, width) is not None:  # raises for a head that does not fit
        head = TrainableRecurrentHead.load(folder, float(model.config.rms_norm_eps)).to(device)
    elif read_mask_tokens(model.config, 2).width > 1:
        raise ModelError(
            f"{folder} holds a draft that predicts at mask tokens (PARD), which does not learn; use a draft without"
            " mask tokens, or with a recurrent head"
        )
    for weight in model.parameters():
        weight.data = weight.data.clone()  # loaded weights may be mapped from the file, so they are copied
        weight.requires_grad_(True)
    has_windows = bool(getattr(model.config, "sliding_window", None))
    model.set_attn_implementation(ATTENTION if device.type == "cpu" and not has_windows else "sdpa")
    return TrainableDraft(model.eval(), head, columns, width)


def _causal_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    **_: object,
) -> tuple[Tensor, None]:
    """Attends causally: query (rows, heads, tokens, dim); key and value (rows, key-value heads, tokens, dim).

    Padding is at the end, so the causal mask hides it. Returns (rows, tokens, heads, dim).
    """
    rows, heads, length, dim = query.shape
    groups = heads // key.shape[1]
    if length >= FUSED_FROM:
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=groups > 1)
        return mixed.transpose(1, 2), None
    packed = (query * scaling).reshape(rows * key.shape[1], groups * length, dim)
    scores = torch.bmm(packed, key.reshape(-1, length, dim).transpose(1, 2))
    later = torch.full((length, length), -torch.inf, device=query.device).triu(1)
    weights = torch.softmax(scores.view(-1, groups, length, length) + later, dim=-1)
    mixed = torch.bmm(weights.view(-1, groups * length, length), value.reshape(-1, length, dim))
    return mixed.view(rows, heads, length, dim).transpose(1, 2), None


AttentionInterface.register(ATTENTION, _causal_attention)


# ---------------------------------------------------------------- loss and choices


class SlicedCrossEntropy(torch.autograd.Function):
    """Sum of the cross-entropies of softmax(states @ weight.T) against one label per row.

    Loss and gradients are computed together, one slice of rows at a time: all logits at once would take hundreds of
    megabytes, and reading them back for the gradient takes as long as the products.
    """

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx, states: Tensor, weight: Tensor, labels: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Takes states (rows, hidden), weight (columns, hidden) and labels (rows,).

        Returns the loss, and whether the likeliest column is the label, (rows,).
        """
        states_grad = torch.empty_like(states)
        weight_grad = torch.zeros_like(weight)
        losses = states.new_empty(len(states))
        agreed = torch.empty_like(labels, dtype=torch.bool)
        for first in range(0, len(states), POSITIONS_AT_ONCE):
            part = slice(first, first + POSITIONS_AT_ONCE)
            logits = states[part] @ weight.T
            highest, likeliest = logits.max(dim=1, keepdim=True)
            expected = labels[part, None]
            agreed[part] = (likeliest == expected)[:, 0]
            at_label = logits.gather(1, expected)
            powers = logits.sub_(highest).exp_()
            total = powers.sum(dim=1, keepdim=True)
            losses[part] = (highest + total.log() - at_label)[:, 0]
            gradient = powers.div_(total)
            gradient.scatter_add_(1, expected, torch.full_like(at_label, -1.0))
            torch.mm(gradient, weight, out=states_grad[part])
            weight_grad.addmm_(gradient.T, states[part])
        ctx.save_for_backward(states_grad, weight_grad)
        ctx.mark_non_differentiable(agreed)
        return losses.sum(), agreed

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        states_grad, weight_grad = ctx.saved_tensors  # type: ignore[attr-defined]
        return states_grad * upstream[0], weight_grad * upstream[0], None


def cross_entropy(states: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Applies `SlicedCrossEntropy`."""
    loss, agreed = SlicedCrossEntropy.apply(states, weight, labels)  # type: ignore[no-untyped-call]
    return loss, agreed


def first_choices(states: Tensor, weight: Tensor) -> Tensor:
    """Returns the likeliest column for each of `states`, (rows, hidden); weight is (columns, hidden)."""
    parts = [(part @ weight.T).argmax(dim=1) for part in torch.split(states, POSITIONS_AT_ONCE)]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.long, device=states.device)


# ---------------------------------------------------------------- checkpoints


class Checkpoint:
    """A draft model's folder as a template: trained weights keep its tensor names and dtypes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._types: dict[str, torch.dtype] = {}
        for key, stored in stored_tensors(folder).items():
            with safe_open(stored.path, framework="pt") as file:
                self._types[key] = file.get_tensor(stored.key).dtype
        self._head_type = torch.float32
        if (folder / RECURRENT_HEAD).is_file():
            with safe_open(folder / RECURRENT_HEAD, framework="pt") as file:
                self._head_type = file.get_tensor("down.weight").dtype

    def rounded(self, draft: TrainableDraft) -> "Weights":
        """Returns copies of a draft's weights in their stored dtypes.

        Raises ModelError if the folder stores weights under names that differ from the model's.
        """
        held = draft.model.state_dict()
        known = {key: held[key] for key in self._types if key in held}
        places = {weight.data_ptr() for weight in known.values()}
        if missing := [name for name, each in draft.model.named_parameters() if each.data_ptr() not in places]:
            raise ModelError(
                f"{self.folder} stores {missing[0]} under another name; save the draft with transformers'"
                " save_pretrained() to train it"
            )
        model = {key: weight.to("cpu", self._types[key], copy=True) for key, weight in known.items()}
        head = {} if draft.head is None else draft.head.state_dict()
        return Weights(model, {name: weight.to("cpu", self._head_type, copy=True) for name, weight in head.items()})


def fingerprint_of(folder: Path) -> str:
    """Hashes the commit of a Hugging Face snapshot; otherwise a draft's weights and configuration."""
    digest = hashlib.blake2b(digest_size=16)
    if is_snapshot(folder):
        digest.update(folder.name.encode())
        return digest.hexdigest()
    for path in sorted(folder.iterdir()):
        if path.suffix in {*WEIGHT_SUFFIXES, ".json"} and path.name != MANIFEST:  # a manifest's state changes
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "blake2b").digest())
    return digest.hexdigest()


def write_draft(folder: Path, weights: "Weights", out: Path) -> None:
    """Writes a complete draft to the folder `out`, its config.json last: these weights, and other files of `folder`.

    Raises ModelError if a file cannot be written; `out` then stays unchanged.
    """
    kept = [path for path in folder.iterdir() if path.is_file() and path.suffix not in WEIGHT_SUFFIXES]
    others = [path for path in kept if path.name not in {INDEX, MANIFEST}]
    partial = out.with_name(f".{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # of a writer that was killed
    try:
        partial.mkdir(parents=True, exist_ok=True)
        save_file(weights.model, partial / SINGLE, metadata={"format": "pt"})
        if weights.head:
            save_file(weights.head, partial / RECURRENT_HEAD)
        for path in others:
            shutil.copyfile(path, partial / path.name)
        out.mkdir(exist_ok=True)
        for path in sorted(partial.iterdir(), key=lambda path: path.name == "config.json"):
            path.replace(out / path.name)
    except (OSError, SafetensorError) as error:
        raise cannot_write(out, error) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def cannot_write(path: Path, error: Exception) -> ModelError:
    return ModelError(f"{path} cannot be written: {error}; check free space and permissions")


@dataclass(frozen=True, slots=True)
class Weights:
    """Weights of a model and of its recurrent head (empty: none), on the CPU, by their stored names."""

    model: dict[str, Tensor]
    head: dict[str, Tensor]
