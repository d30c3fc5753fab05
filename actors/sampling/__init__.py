"""From logits to committed tokens.

`processors` change logits by the text before them (penalties, bias, masks, grammars), `filters` apply temperature,
top-k, top-p and min-p. `gumbel` is the noise: a pure function of seed, choice, position, purpose and token id, so
drafter and target draw the same token. `reference` states the two acceptance rules for one block and is the
specification; `rejection_sampler` applies them to all blocks of a step with one copy to the host, and tests require
both to agree. `scoring` computes log probabilities and how near a tie a decision was.
"""
