"""Generate the client for threads from the client for asyncio: remove `async` and `await`, and replace names."""

import re
import subprocess
import sys
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "clients/python/src/encserve_client"
SOURCE, TARGET = PACKAGE / "async_client.py", PACKAGE / "client.py"
NOTE = "# Generated from async_client.py by `make sync-client`. Change async_client.py instead.\n"
REPLACEMENTS = (
    (r"\basync (def|for|with)\b", r"\1"),
    (r"\bawait ", ""),
    (r"\b_async_transport\b", "_sync_transport"),
    (r"\bAsyncTransport\b", "SyncTransport"),
    (r"\bAsyncEncoderClient\b", "EncoderClient"),
    (r"\bfor asyncio\b", "for threads"),
)


def sync_client(source: str) -> str:
    """Return the source code of the client for threads."""
    for pattern, replacement in REPLACEMENTS:
        source = re.sub(pattern, replacement, source)
    source = _ruff(["check", "--quiet", "--select", "I", "--fix"], NOTE + source)
    return _ruff(["format"], source)


def _ruff(arguments: list[str], source: str) -> str:
    command = [sys.executable, "-m", "ruff", *arguments, "--stdin-filename", str(TARGET), "-"]
    return subprocess.run(command, input=source, capture_output=True, text=True, check=True).stdout


def main() -> None:
    """Write client.py, or the file of the first argument."""
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else TARGET
    target.write_text(sync_client(SOURCE.read_text(encoding="utf-8")), encoding="utf-8", newline="\n")


if __name__ == "__main__":
    main()
