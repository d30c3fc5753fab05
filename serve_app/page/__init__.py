"""The live page at `/`: what the pools are at, and a prompt whose answer shows what was drafted."""
