"""Callers of an infinity server, in a process of their own. Runs in infinity's environment.

Vectors are asked for in base64, the faster of the two ways in which infinity writes them, and replies are read and not
parsed.
"""

import argparse
import asyncio
import base64
import json
import time
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
from lines import answer_lines, versions


def main() -> None:
    """Asks when told to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", required=True)
    parser.add_argument("--workload", type=Path, required=True)
    options = parser.parse_args()

    def prepare() -> tuple[dict[str, Any], dict[str, Any]]:
        texts = json.loads(options.workload.read_text())["texts"]
        bodies = [
            json.dumps({"model": "encoder", "input": [text], "encoding_format": "base64"}).encode() for text in texts
        ]
        handlers = {
            "run": lambda callers, count: asyncio.run(closed_loop(options.url, bodies, callers, count)),
            "check": lambda places, file: asyncio.run(save_vectors(options.url, [bodies[it] for it in places], file)),
        }
        return versions("infinity-emb", "torch", "transformers", "optimum", "aiohttp"), handlers

    answer_lines(prepare)


def session() -> Any:
    """Connections that stay open, as many as there are callers."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), headers={"Content-Type": "application/json"}, auto_decompress=False
    )


async def ask(http: Any, url: str, body: bytes) -> Any:
    """One call; the bytes of its reply."""
    async with http.post(url, data=body) as reply:
        reply.raise_for_status()
        return await reply.read()


async def save_vectors(url: str, bodies: list[bytes], file: str) -> dict[str, Any]:
    """Writes the vector of each text, (1, d_model)."""
    async with session() as http:
        replies = [json.loads(await ask(http, url, body)) for body in bodies]
    vectors = [np.frombuffer(base64.b64decode(it["data"][0]["embedding"]), np.float32)[None] for it in replies]
    np.savez(file, *vectors)
    return {}


async def closed_loop(url: str, bodies: list[bytes], callers: int, count: int) -> dict[str, Any]:
    """Makes `count` calls, beginning again where they end; each caller sends its next when it has the reply."""
    numbers = iter(range(count))  # shared by the callers
    latencies: list[tuple[int, float]] = []
    async with session() as http:

        async def caller() -> None:
            for number in numbers:
                sent = time.perf_counter()
                await ask(http, url, bodies[number % len(bodies)])
                latencies.append((number % len(bodies), time.perf_counter() - sent))

        began = time.perf_counter()
        await asyncio.gather(*(caller() for _ in range(callers)))
        seconds = time.perf_counter() - began
    return {"seconds": seconds, "latencies": latencies}


if __name__ == "__main__":
    main()
