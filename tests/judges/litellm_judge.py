"""Ranks documents with LiteLLM, as its providers for Cohere, Jina, vLLM and text-embeddings-inference send requests.

The program runs in the virtual environment of the requirements file gateways.txt.
"""

from typing import Any

import litellm
from judge_io import address, model, texts, write

# The address of each provider.
providers = {"cohere": "", "jina_ai": "/v1/rerank", "hosted_vllm": "", "huggingface": ""}
facts: dict[str, Any] = {}
for name, path in providers.items():
    reply = litellm.rerank(
        model=f"{name}/{model}", query=texts[0], documents=texts, api_base=f"{address}{path}", api_key="none"
    )
    facts[name] = [(it["index"], it["relevance_score"]) for it in reply.results]
write({}, facts)
