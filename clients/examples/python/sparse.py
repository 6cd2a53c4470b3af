"""Rank documents by the weights of words. The server has a sparse model (SPLADE) with the name splade."""

from encserve_client import EncoderClient, rank

DOCUMENTS = ["Stock markets fell sharply on Monday.", "The Baltic has 18 degrees in July."]
with EncoderClient() as client:
    query = client.embed("How warm is the sea?", kind="sparse", task="query", model="splade")
    documents = client.embed(DOCUMENTS, kind="sparse", task="document", model="splade")  # one SparseVector for each
    print(f"{len(query.indices)} of {query.width} weights are not 0")
    print("token ids", query.indices[:3], "weights", query.values[:3])
    for index, score in rank(query, documents, client.model("splade")):  # the best first
        print(f"{score:.3f} {DOCUMENTS[index]}")
