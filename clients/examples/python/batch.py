"""Compare three texts with each other. One call can send any number of texts."""

from encserve_client import EncoderClient

TEXTS = [
    "The cat sleeps on the warm windowsill.",
    "A kitten is napping by the sunny window.",
    "Stock markets fell sharply on Monday.",
]
with EncoderClient() as client:
    vectors = client.embed(TEXTS, l2_normalize=True)  # (texts, d_model)
    print((vectors @ vectors.T).round(3))  # the cosine similarity of each pair
