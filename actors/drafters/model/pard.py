"""Several tokens in one forward, predicted at mask tokens after the last known one (PARD).

PARD: An et al. 2025, arXiv 2504.18583. A mask token attends to the tokens before it and the masks between, not to the
tokens that will replace the masks. So one forward predicts several tokens, the later ones somewhat worse than one
forward each would. Keys and values of masks are discarded afterwards.
"""

from dataclasses import dataclass

from transformers import PretrainedConfig

from cluster.errors import ModelError

MASK_KEYS = ("pard_token", "ptd_token_id", "mask_token_id")  # keys in a checkpoint's configuration; authors differ
WIDTH_KEY = "tokens_per_forward"


@dataclass(frozen=True, slots=True)
class MaskTokens:
    """Number of tokens predicted in one forward: `width`, the last `width` - 1 of them at mask `token`."""

    token: int
    width: int

    def after(self, tokens: int) -> tuple[int, ...]:
        """Returns the masks to feed to predict this many tokens; the first one follows the last known token."""
        return (self.token,) * (min(self.width, tokens) - 1)


ONE_AT_A_TIME = MaskTokens(token=0, width=1)


def read_mask_tokens(config: PretrainedConfig, longest: int) -> MaskTokens:
    """Reads the mask token that the checkpoint was trained with. Raises ModelError if its id is out of range."""
    token = next((found for key in MASK_KEYS if (found := getattr(config, key, None)) is not None), None)
    if token is None:
        return ONE_AT_A_TIME
    rows = int(config.get_text_config().vocab_size)
    if not isinstance(token, int) or not 0 <= token < rows:
        raise ModelError(f"the draft model's mask token is {token!r}, expected an id from 0 to {rows - 1}")
    return MaskTokens(token, tokens_per_forward(config, longest))


def tokens_per_forward(config: PretrainedConfig, longest: int) -> int:
    """Returns how many tokens the checkpoint was trained to predict in one forward, `longest` by default.

    Raises ModelError if the configured number is invalid.
    """
    width = getattr(config, WIDTH_KEY, longest)
    if not isinstance(width, int) or width < 1:
        raise ModelError(f"the draft model's {WIDTH_KEY} is {width!r}, expected 1 or more")
    return width
