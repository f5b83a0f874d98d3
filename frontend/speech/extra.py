"""The packages of meshlm[audio], which servers of other models do without."""

from meshlm.frontend.errors import HttpError


def not_installed(package: str) -> HttpError:
    """The answer where a package is missing."""
    text = f"audio need {package}, which is not installed at the server: pip install 'meshlm[audio]'"
    return HttpError(500, text, kind="internal_error")
