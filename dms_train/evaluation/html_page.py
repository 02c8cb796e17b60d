"""HTML pages that load nothing: pictures and data are part of them."""

from __future__ import annotations

import base64
import html
import json
from collections.abc import Iterable
from io import BytesIO
from typing import Any

from dms_train.tables import html_table

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem; padding: 0 1rem }
h1, h2 { font-weight: 600 } figure { margin: 0 }
section { display: grid; grid-template-columns: repeat(auto-fit, minmax(28rem, 1fr)); gap: 1rem }
img { max-width: 100% } table { border-collapse: collapse; margin: .5rem 0 1.5rem }
th, td { border-bottom: 1px solid #ddd; padding: .2rem .8rem; text-align: right }
th:first-child, td:first-child { text-align: left } pre { background: #f6f6f6; padding: 1rem }
"""


def page(title: str, parts: Iterable[str], data: Any) -> str:
    """Return a page.

    Args:
        title: Title as plain text.
        parts: HTML of the parts, in their order; an empty part is left out.
        data: Value that the page stores as JSON, for programs.
    """
    name = html.escape(title)
    lines = [
        "<!DOCTYPE html><html lang='en'><head><meta charset='utf-8'>",
        # a reader's guarantee: a browser refuses to load anything for this page
        "<meta http-equiv='Content-Security-Policy' "
        "content=\"default-src 'none'; img-src data:; style-src 'unsafe-inline'\">",
        f"<title>{name}</title><style>{_STYLE}</style></head><body>",
        f"<h1>{name}</h1>",
        *parts,
        # the JSON must not end the element around it
        "<script type='application/json' id='metrics'>",
        json.dumps(data).replace("<", "\\u003c"),
        "</script></body></html>",
    ]
    return "\n".join(line for line in lines if line) + "\n"


def figure(picture: BytesIO, title: str) -> str:
    """Return a PNG as an element of a page; `title` describes it."""
    data = base64.b64encode(picture.getvalue()).decode("ascii")
    return f"<figure><img alt='{html.escape(title)}' src='data:image/png;base64,{data}'></figure>"


def table(header: list[str], lines: Iterable[list[Any]]) -> str:
    """Return a table; numbers have six significant digits, and None is an empty cell."""
    return html_table(header, (map(_cell, line) for line in lines))


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        return f"{value:,.0f}"
    return f"{value:.6g}" if isinstance(value, float) else str(value)
