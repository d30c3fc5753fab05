"""From logits to committed tokens.

`processors` change logits by the text before them (penalties, bias, masks, grammars), `filters` apply temperature,
top-k, top-p and min-p. `gumbel` is the noise: a pure function of seed, choice, position, purpose and token id, so
drafter and target draw the same token. `rejection_sampler` applies the two acceptance rules to all blocks of a step
with one copy to the host. `scoring` computes log probabilities and how near a tie a decision was.
"""
