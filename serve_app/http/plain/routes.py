"""Routes that answer from what is known at the start: the model's names, the version, what can be asked."""

import json

from fastapi import FastAPI
from starlette.responses import HTMLResponse, Response

from cluster.config import SlipstreamConfig
from serve_app.http.plain.docs_page import HEADERS, docs_page
from serve_app.http.plain.openapi import description
from serve_app.http.plain.served_model import find_card, model_list, version
from serve_app.http.wire.replies import ModelCard, ModelList, VersionReport


def add_plain_routes(api: FastAPI, config: SlipstreamConfig) -> None:
    """Adds them to the application."""
    models = model_list(config)
    described = description(version(), with_keys=bool(config.server.keys))
    document = json.dumps(described)
    page = docs_page(described)

    @api.get("/v1/models")
    async def list_models() -> ModelList:
        return models

    @api.get("/v1/models/{name:path}")
    async def show_model(name: str) -> ModelCard:
        return find_card(models, name)

    @api.get("/version")
    async def report_version() -> VersionReport:
        return VersionReport(version=version())

    @api.get("/openapi.json")
    async def describe() -> Response:
        return Response(document, media_type="application/json")

    @api.get("/docs")
    async def show_docs() -> Response:
        return HTMLResponse(page, headers=HEADERS)
