"""From logits to committed tokens.

`processors` change logits depending on the preceding text (penalties, bias, masks, grammars); `filters` apply
temperature, top-k, top-p and min-p. `gumbel` computes the noise: a pure function of seed, choice, position, purpose and
token id, so drafter and target draw the same token. `rejection_sampler` applies the two acceptance rules to all blocks
of a step with one copy to the host. `scoring` computes log probabilities and how near a tie a decision was.
"""
