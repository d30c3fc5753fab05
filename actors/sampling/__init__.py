"""From logits to committed tokens.

`logits_processors` change logits depending on the preceding text (penalties, bias, masks, grammars); `truncation`
applies temperature, top-k, top-p and min-p. `gumbel` computes the noise: a pure function of seed, choice, position,
purpose and token id, so drafter and target draw the same token. `acceptance` applies the two acceptance rules,
rejection sampling and Gumbel coupling, to all blocks of a step with one copy to the host. `scoring` computes log
probabilities and how near a tie a decision was.
"""
