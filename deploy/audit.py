"""Asks the database of known vulnerabilities for each package that is installed here, by pip-audit. Exit code 1 where one has any.

    python -P deploy/audit.py

Where the database cannot be reached, or does not know the packages, it says so and what was not looked at, and the exit code is 0.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

LIMIT_S = 60


def read(text: str) -> tuple[list[str], list[str]]:
    """A line for each vulnerability, and the packages that were not looked at. ValueError for what is no report, or looked at none."""
    report: dict[str, Any] = json.loads(text)
    found, skipped = [], []
    for package in report["dependencies"]:
        if "skip_reason" in package:
            skipped.append(str(package["name"]))
        for one in package.get("vulns", ()):
            mended = ", ".join(one.get("fix_versions", ())) or "none yet"
            found.append(f"{package['name']} {package['version']}: {one['id']} (mended in: {mended})")
    if skipped and len(skipped) == len(report["dependencies"]):
        raise ValueError("the index has no vulnerabilities of any package")
    return found, skipped


def main() -> int:
    program = shutil.which("pip-audit", path=str(Path(sys.executable).parent)) or shutil.which("pip-audit")
    if program is None:
        print("audit: pip-audit is not installed; pip install '.[release]' in the tree", file=sys.stderr)
        return 1
    try:
        environment = {**os.environ, "PIP_AUDIT_PROGRESS_SPINNER": "off"}
        done = subprocess.run(
            [program, "-f", "json"], env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
        found, skipped = read(done.stdout)
    except (subprocess.TimeoutExpired, ValueError, KeyError):
        print(
            "audit: skipped, since the database of vulnerabilities cannot be reached or knows no package; nothing was looked at"
        )
        return 0
    for line in found:
        print(line)
    if skipped:
        print(f"audit: {len(skipped)} packages are not in the database: {', '.join(skipped)}")
    print(f"audit: {len(found)} known vulnerabilities")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
