"""Browsers of other origins: Starlette's rules, with refusals in OpenAI's form."""

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from serve_app.http.wire.replies import ErrorDetail, error_response


class CrossOrigin(CORSMiddleware):
    """Answers a browser that asks whether it may send a request."""

    def preflight_response(self, request_headers: Headers) -> Response:
        """Returns Starlette's answer; a refusal, which Starlette words as plain text, as an error."""
        answer = super().preflight_response(request_headers)
        if answer.status_code < 400:
            return answer
        words = bytes(answer.body).decode()
        headers = {name: value for name, value in answer.headers.items() if not name.startswith("content-")}
        detail = ErrorDetail(message=words, type="invalid_request_error", code="cross_origin")
        return error_response(answer.status_code, detail, headers)
