"""Rank documents for a query. The task tells the model which text is a query or a document."""

from encserve_client import EncoderClient, rank

DOCUMENTS = [
    "Stock markets fell sharply on Monday.",
    "The Baltic has 18 degrees in July.",
    "A kitten is napping by the sunny window.",
]
with EncoderClient() as client:
    query = client.embed("How warm is the sea?", task="query")  # (d_model,)
    documents = client.embed(DOCUMENTS, task="document")  # (documents, d_model)
    for index, score in rank(query, documents, client.model(), top_k=2):  # the best first
        print(f"{score:.3f} {DOCUMENTS[index]}")
