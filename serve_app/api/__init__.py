"""OpenAI-compatible HTTP API.

A request passes `access` (API keys and their limits), `limits` (body size and deadlines) and `app`, which parses the
body with `schemas`, resolves it in `validation` and starts one session per choice. `generation` turns committed tokens
into text, `tool_calls` splits text into content, reasoning and calls, and a format of `endpoints` writes the reply,
whole or as server-sent events (`streaming`). `failures` maps every exception to a status and an OpenAI error body. The
package knows nothing of drafters, targets or Ray; `generation.Generator` is the interface to them.
"""
