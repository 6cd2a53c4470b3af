"""Rank documents by MaxSim. The server has a multi-vector model (late interaction) with the name late."""

from encserve_client import EncoderClient, rank

DOCUMENTS = ["Stock markets fell sharply on Monday.", "The Baltic has 18 degrees in July."]
with EncoderClient() as client:
    query = client.embed("How warm is the sea?", kind="multi_vector", task="query", model="late")  # (n, width)
    documents = client.embed(DOCUMENTS, kind="multi_vector", task="document", model="late")  # an array for each
    print("query", query.shape, "documents", [document.shape for document in documents])
    for index, score in rank(query, documents, client.model("late")):  # the best first
        print(f"{score:.3f} {DOCUMENTS[index]}")
