"""HTTP routes of the live page: its files, and its state as JSON."""

from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from serve_app.http.streaming import as_json
from serve_app.page.watch import PageWatch

HEADERS = {
    "Cache-Control": "no-cache",
    # Only this server's own files are allowed, and no embedding in frames.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self';"
    " connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}


def page_routes(watch: PageWatch) -> list[Route]:
    """Returns the routes `/`, the static files, and `/page/state`."""

    async def state(_: Request) -> Response:
        return as_json(await watch.state())

    return [_file_route("/", "index.html"), *_static_routes(), Route("/page/state", state)]


def _static_routes() -> list[Route]:
    names = [path.name for path in (files("serve_app.page") / "static").iterdir() if path.name != "index.html"]
    return [_file_route(f"/page/{name}", name) for name in names]


def _file_route(path: str, name: str) -> Route:
    """Serves a file that is read once, because files are few and small."""
    content = (files("serve_app.page") / "static" / name).read_bytes()
    media_type = TYPES[name[name.rindex(".") :]]

    async def answer(_: Request) -> Response:
        return Response(content, headers=HEADERS, media_type=media_type)

    return Route(path, answer)
