"""The page's static files as routes. They hold no secret and need no token; what they show does.

Rules
-----
* Plain files in the package: no build step, and a policy that lets the page load nothing from elsewhere.
* All addresses in them are relative, so the page works behind a path prefix.
"""

from __future__ import annotations

from pathlib import Path

from aiohttp import web

STATIC = Path(__file__).parent / "static"
_KINDS = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def page_routes() -> list[web.RouteDef]:
    """Return the routes of `/` and `/page/FILE`."""
    return [web.get("/", _index), web.get("/page/{name}", _file)]


def is_page(path: str) -> bool:
    """Return whether the path is one of those routes."""
    return path == "/" or path.startswith("/page/")


async def _index(_: web.Request) -> web.Response:
    return _answer("index.html")


async def _file(request: web.Request) -> web.Response:
    return _answer(request.match_info["name"])


def _answer(name: str) -> web.Response:
    path = STATIC / name
    if "/" in name or path.suffix not in _KINDS or not path.is_file():
        raise web.HTTPNotFound
    return web.Response(body=path.read_bytes(), content_type=_KINDS[path.suffix], charset="utf-8", headers=_HEADERS)
