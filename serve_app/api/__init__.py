"""OpenAI-compatible HTTP API.

A request passes these modules:

    access          API keys and their limits, request ids, the admin port
    limits          body size, upload time, request deadline
    app             one endpoint per path; `ApiEndpoint` runs the steps below
    endpoints       `ApiFormat` parses the body into a request of `schemas`, and writes the reply
    validation      checks the request, and resolves it into `Generation` sessions, one per choice
    chat            conversation to prompt, with `chat_template`
    grammars        grammar of the answer's content or calls
    generation      runs the sessions through a `Generator`
    choices         `CommittedTokens` -> `Delta` (text) -> `ChoiceEvent` (content, reasoning, call, end)
    tool_calls      splits text into segments by the model's response template
    streaming       server-sent events, keep-alive comments, disconnects

Parsing and tokenising run on a few threads, rendering of chat templates in a separate process (`template_process`), and
the rest on the event loop. A failure anywhere becomes a RequestError or another exception that `failures` maps to a
status and an OpenAI error body. `observability` and `metrics` read the `RequestRecord` that the endpoint fills.

FastAPI documents the routes (`openapi`), but the endpoints parse bodies themselves: pydantic would validate a body of
any size, and FastAPI would report errors in its own form. The package knows nothing of drafters, targets or Ray;
`generation.Generator` is the interface to them.
"""
