"""The packages of the extra `audio`, which servers of other models do without."""

from meshlm.frontend.http.errors import HttpError
from meshlm.runtime.extras import how_to_install


def not_installed(package: str) -> HttpError:
    """The answer where a package is missing."""
    text = f"audio need {package}, which is not installed at the server: {how_to_install('audio')}"
    return HttpError(500, text, kind="internal_error")
