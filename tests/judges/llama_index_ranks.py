"""Ranks documents with LlamaIndex's postprocessors.

The program runs in the virtual environment of the requirements file rankers.txt.
"""

from typing import Any

from llama_index.core.schema import NodeWithScore, TextNode
from llama_index.postprocessor.cohere_rerank import CohereRerank
from llama_index.postprocessor.jinaai_rerank import JinaRerank
from llama_index.postprocessor.tei_rerank import TextEmbeddingInference
from rank_io import Ranks, address, documents, model, query, rank_with


def rank(postprocessor: Any) -> Ranks:
    nodes = [NodeWithScore(node=TextNode(text=text, id_=f"{i}")) for i, text in enumerate(documents)]
    found = postprocessor.postprocess_nodes(nodes, query_str=query)
    return [(int(it.node.node_id), it.score) for it in found]


rank_with(
    {
        "CohereRerank": lambda: rank(CohereRerank(base_url=address, api_key="none", model=model)),
        "JinaRerank": lambda: rank(JinaRerank(base_url=f"{address}/v1", api_key="none", model=model)),
        "TextEmbeddingInference": lambda: rank(TextEmbeddingInference(base_url=address)),
    }
)
