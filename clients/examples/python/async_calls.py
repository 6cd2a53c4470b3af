"""Make several calls at the same time with asyncio. All calls share one client and one connection."""

import asyncio

from encserve_client import AsyncEncoderClient


async def main() -> None:
    async with AsyncEncoderClient() as client:
        words = ["cat", "kitten", "market"]
        vectors = await asyncio.gather(*(client.embed(word) for word in words))
        for word, vector in zip(words, vectors, strict=True):
            print(word, vector.shape)


asyncio.run(main())
