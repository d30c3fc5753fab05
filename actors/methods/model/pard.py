"""Several tokens in one forward, by mask tokens after the last known one (PARD).

(PARD: An et al. 2025, arXiv 2504.18583.) A mask token sees what the tokens before it say and the masks between, not the
tokens that will stand there: a forward predicts several tokens, the further ones somewhat worse than one forward each
would. Its keys and values are of no use afterwards.
"""

from dataclasses import dataclass

from transformers import PretrainedConfig

from cluster.errors import ModelError

MASK_KEYS = ("pard_token", "ptd_token_id", "mask_token_id")  # of a checkpoint's configuration, by who made it
WIDTH_KEY = "tokens_per_forward"


@dataclass(frozen=True, slots=True)
class MaskTokens:
    """What a draft model predicts in one forward: `width` tokens, the last `width` - 1 of them by `token`."""

    token: int
    width: int

    def after(self, tokens: int) -> tuple[int, ...]:
        """The masks to feed for this many tokens to be predicted, the first of them after the last known token."""
        return (self.token,) * (min(self.width, tokens) - 1)


ONE_AT_A_TIME = MaskTokens(token=0, width=1)


def read_mask_tokens(config: PretrainedConfig, longest: int) -> MaskTokens:
    """What the checkpoint was trained for. Raises ModelError where it names a mask token that it does not have."""
    token = next((found for key in MASK_KEYS if (found := getattr(config, key, None)) is not None), None)
    if token is None:
        return ONE_AT_A_TIME
    rows = int(config.get_text_config().vocab_size)
    if not isinstance(token, int) or not 0 <= token < rows:
        raise ModelError(f"the draft model's mask token is {token!r}, expected an id from 0 to {rows - 1}")
    return MaskTokens(token, tokens_per_forward(config, longest))


def tokens_per_forward(config: PretrainedConfig, longest: int) -> int:
    """That the checkpoint was trained for, or `longest`. Raises ModelError for a number that cannot be."""
    width = getattr(config, WIDTH_KEY, longest)
    if not isinstance(width, int) or width < 1:
        raise ModelError(f"the draft model's {WIDTH_KEY} is {width!r}, expected 1 or more")
    return width
