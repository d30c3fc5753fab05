"""Finds the target's noise for the tokens of another vocabulary."""

from collections.abc import Mapping

import torch
from torch import Tensor

from actors.drafters.model.sampling import NoiseSource
from cluster.drafting.draft_state import BlockDraft
from cluster.drafting.translation import TranslatedText, Translator


class TranslatedNoise(NoiseSource):
    """Gives each draft token the noise of the target token with the same bytes, if there is one."""

    def __init__(self, texts: Mapping[str, TranslatedText]) -> None:
        self._texts = texts
        self._shared: dict[int, Tensor] = {}  # by translator: target token by draft token, (draft vocabulary,)

    def ids(self, draft: BlockDraft, tokens: Tensor) -> Tensor:
        translator = self._translator(draft)
        if id(translator) not in self._shared:
            self._shared[id(translator)] = torch.tensor(translator.shared_ids(), device=tokens.device)
        return self._shared[id(translator)][tokens]

    def position(self, draft: BlockDraft, position: int) -> int:
        text = self._texts[draft.request.session]
        count = position - draft.request.base_len
        path = (draft.outcome + (draft.tokens if draft.unverified is None else draft.unverified))[:count]
        return text.target_len + sum(map(text.translator.width, path)) + count - len(path)

    def _translator(self, draft: BlockDraft) -> Translator:
        return self._texts[draft.request.session].translator
