"""From logits to committed tokens.

`logits_processors` changes logits depending on the preceding text (penalties, bias, masks, grammars). `truncation`
applies temperature, top-k, top-p and min-p. `gumbel` computes noise as a pure function of seed, choice, position,
purpose and token id, so drafter and target draw with the same noise. `acceptance` applies rejection sampling or Gumbel
coupling to all blocks of a step, with one copy to the host. `scoring` computes log probabilities and the margins of
decisions.
"""
