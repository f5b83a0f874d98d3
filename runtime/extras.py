"""How to install the packages that a part of MeshLM needs and the others do without (optional-dependencies of pyproject.toml).

MeshLM is on no package index, so its own name installs nothing there: the packages themselves are named.
"""

import re

_REQUIREMENT = re.compile(r"""([^;]+?)\s*;.*\bextra\s*==\s*["']([\w-]+)["']""")


def how_to_install(extra: str) -> str:
    """The command for these packages: pip install 'rich>=14'."""
    import importlib.metadata  # of those alone who lack something

    try:
        listed = importlib.metadata.requires("meshlm") or []
    except importlib.metadata.PackageNotFoundError:  # its folders are on PYTHONPATH
        listed = []
    found = [match[1] for one in listed if (match := _REQUIREMENT.fullmatch(one)) and match[2] == extra]
    if not found:
        return f"pip install '.[{extra}]' in MeshLM's source tree"
    return f"pip install {' '.join(repr(one) for one in found)}"
