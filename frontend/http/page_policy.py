"""What a browser may do with what this server sends: with data nothing, with a page what it names. Of /dashboard and /docs."""

import base64
import hashlib

# Of data and files that are no page; a page has a policy of its own.
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


def source(text: str) -> str:
    """Names this text to a browser, which runs or applies no other."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
