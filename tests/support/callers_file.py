"""Writes tables of a callers file."""

from typing import Any

from encserve_server.callers.keys import digest_of


def entry(name: str, *keys: str, **fields: Any) -> str:
    """Return a [[caller]] table of a callers file. The values in `fields` must be TOML text."""
    hashes = ", ".join(f'"{digest_of(key).hex()}"' for key in keys)
    lines = ["[[caller]]", f'name = "{name}"', f"key_sha256 = [{hashes}]"]
    return "\n".join([*lines, *(f"{field} = {value}" for field, value in fields.items())]) + "\n"
