"""Decides how a draft model's tokens become tokens of the target: as they are, or translated through text."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from actors.drafters.translation.text_tokens import load_text_tokens
from actors.models.checkpoint import different_ids, local_folder
from actors.models.config_reader import embedding_rows, is_recurrent, read_config
from actors.models.tokenizer_reader import has_tokenizer, load_tokenizer
from cluster.config import DraftPool
from cluster.drafting.translation import Translator
from cluster.errors import ModelError


@dataclass(frozen=True, slots=True)
class Pairing:
    """A draft model and the source of its tokenizer."""

    draft: Path
    tokenizer: Path | None  # folder of the draft's tokenizer, if drafts are translated; None: ids are shared

    @property
    def is_translated(self) -> bool:
        return self.tokenizer is not None

    def draft_tokens(self, target: Mapping[int, str]) -> Mapping[int, str]:
        """Returns the tokens that the draft may propose, given the target's."""
        if self.tokenizer is None:
            return target
        return _tokens(self.tokenizer, embedding_rows(self.draft))

    def translator(self, target: Path) -> Translator:
        """Loads both tokenizers. Raises ModelError if one of them cannot be translated."""
        assert self.tokenizer is not None, "only other tokenizers are translated"
        draft = load_text_tokens(self.tokenizer)
        rows = embedding_rows(self.draft)
        return Translator(load_text_tokens(target), draft if rows is None else draft.below(rows))


def draft_pairing(draft: DraftPool, target_tokens: Mapping[int, str], with_weights: bool = True) -> Pairing:
    """Returns the pairing of the configured draft model with the target. Raises ModelError if they cannot be paired."""
    assert draft.model is not None, "only draft models are paired"
    tokenizer = None if draft.tokenizer is None else local_folder(draft.tokenizer, with_weights=False)
    return pairing_of(target_tokens, local_folder(draft.model, with_weights), tokenizer)


def pool_pairing(draft: DraftPool, targets: Iterable[Mapping[int, str]], with_weights: bool = True) -> Pairing:
    """Returns the pairing of a draft model with all targets of its pool, given their tokens.

    Drafts are translated for all targets if any of them has another vocabulary. Raises ModelError if a target cannot be
    paired, or if `prompt` is `template` and no draft is translated.
    """
    pairings = [draft_pairing(draft, tokens, with_weights) for tokens in targets]
    pairing = next((one for one in pairings if one.is_translated), pairings[0])
    if draft.prompt == "template" and not pairing.is_translated:
        raise ModelError(
            f"draft.prompt is template, but the draft {pairing.draft} has the target's vocabulary and reads its tokens;"
            " remove draft.prompt"
        )
    return pairing


def pairing_of(target: Mapping[int, str], draft: Path, tokenizer: Path | None = None) -> Pairing:
    """Compares vocabularies; `tokenizer` is the draft's tokenizer if its folder contains none.

    Without any tokenizer, a draft is assumed to use the target's. Sizes of embeddings may differ. A draft with the
    target's ids still needs an embedding for each of them, since any may be fed; otherwise it is translated. Raises
    ModelError if the draft can neither share ids nor be translated.
    """
    config = read_config(draft)
    if is_recurrent(config):
        raise ModelError(
            f"draft {draft} is a {config.model_type}, whose recurrent layers cannot take back rejected drafts;"
            " use a draft model with attention in all layers, or the ngram method"
        )
    rows = int(config.get_text_config().vocab_size)
    source = tokenizer or (draft if has_tokenizer(draft) else None)
    if source is None:
        if rows <= max(target):
            raise ModelError(
                f"draft {draft} has {rows} vocabulary rows, but the target's ids go up to {max(target)}, and the draft"
                " has no tokenizer; set draft.tokenizer to a folder or Hugging Face id with its tokenizer"
            )
        return Pairing(draft, None)
    tokens = _tokens(source, rows)
    shares_ids = rows > max(target) and not different_ids(target, tokens) and not target.keys().isdisjoint(tokens)
    return Pairing(draft, None if shares_ids else source)


def _tokens(source: Path, rows: int | None) -> dict[int, str]:
    """Returns a tokenizer's tokens that have an embedding, by id."""
    ids: Mapping[str, int] = load_tokenizer(source).get_vocab()
    return {token: text for text, token in ids.items() if rows is None or token < rows}


def describe(pairing: Pairing, target: Path) -> str:
    """Describes how a draft's tokens become the target's, and what that costs."""
    if not pairing.is_translated:
        sizes = {size for folder in (target, pairing.draft) if (size := embedding_rows(folder)) is not None}
        rows = " and ".join(map(str, sorted(sizes)))
        return f"vocabulary shared with the target, padded to {rows} rows" if len(sizes) > 1 else "same vocabulary"
    shared = pairing.translator(target).shared_ids()
    share = sum(token >= 0 for token in shared) / len(shared)
    return (
        f"drafts are translated through text: {share:.0%} of the draft's tokens are tokens of the target; costs"
        " under 0.1 ms per block, excludes rejection sampling, and ignores grammars and token biases while drafting"
    )
