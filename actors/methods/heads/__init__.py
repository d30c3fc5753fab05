"""Draft heads: small networks that read the target's hidden states, loaded from published checkpoints as they are."""
