"""Look the packages of constraints.txt up in the database of known vulnerabilities: `make audit`.

Says so where the database cannot be reached, which is no failure. A known vulnerability is one.
"""

import importlib.util
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
UNREACHABLE = ("ConnectionError", "Max retries exceeded", "Name or service not known", "timed out", "ServiceError")


def is_installed() -> bool:
    """Whether pip-audit is there, or could be installed now."""
    if importlib.util.find_spec("pip_audit") is not None:
        return True
    command = [sys.executable, "-m", "pip", "install", "--quiet", "-c", str(ROOT / "constraints.txt"), "pip-audit"]
    return subprocess.run(command, capture_output=True).returncode == 0


def main() -> int:
    if not is_installed():
        print("NOT AUDITED: pip-audit cannot be installed here")
        return 0
    command = [sys.executable, "-m", "pip_audit", "--requirement", str(ROOT / "constraints.txt"), "--no-deps"]
    try:
        done = subprocess.run(
            [*command, "--disable-pip", "--progress-spinner", "off", "--timeout", "15"],
            capture_output=True, text=True, timeout=300,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        print("NOT AUDITED: the database of vulnerabilities did not answer within five minutes")
        return 0
    said = done.stdout + done.stderr
    if done.returncode and any(sign in said for sign in UNREACHABLE):
        print("NOT AUDITED: the database of vulnerabilities cannot be reached from here")
        return 0
    if skipped := said.count("could not be audited"):
        print(f"NOT AUDITED: the database that can be reached from here does not know {skipped} of the packages")
    found = [line for line in said.splitlines() if "could not be audited" not in line]
    print("\n".join(found) if done.returncode or not skipped else "")
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
