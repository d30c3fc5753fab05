"""OpenAI-compatible HTTP API.

A request passes these modules:

    access          API keys and their limits, request ids, the admin port
    limits          body size, upload time, request deadline
    routes          one endpoint per path; `ApiEndpoint` runs the steps below
    formats         `ApiFormat` parses the body into a request of `request_schemas`, and writes the reply
    validation      checks the request, and resolves it into `Generation` sessions, one per choice
    chat            conversation to prompt, with `chat_template`
    grammars        builds the grammar of the answer's content or calls
    generation      runs the sessions through a `Generator`
    choices         converts `CommittedTokens` -> `Delta` (text) -> `ChoiceEvent` (content, reasoning, call, end)
    tool_calls      splits text into segments by the model's response template
    streaming       sends server-sent events and keep-alive comments, detects disconnects

Parsing and tokenizing run on worker threads. Chat templates are rendered in a separate process (`template_process`).
Everything else runs on the event loop. `failures` maps every exception to a status and an OpenAI error body. The
endpoint fills a `RequestRecord`, which `observability` and `metrics` read.

FastAPI documents the routes (`openapi`), but the endpoints parse bodies themselves: pydantic would validate bodies of
any size, and FastAPI would report errors in its own format. The package is independent of drafters, targets and Ray;
`generation.Generator` is the interface to them.
"""
