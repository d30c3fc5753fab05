"""How far to draft, how long to wait for blocks, and whether speculation pays at all: pure, from what was measured."""
