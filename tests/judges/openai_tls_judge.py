"""Runs in the environment of clients.txt: openai's client over TLS, with the files that httpx is given.

Reads the server's URL, the authorities' file, and the files of a certificate and its key, or nothing; OPENAI_API_KEY is
the server's key. Writes the length of a vector, or what went wrong.
"""

import os
import ssl
import sys

import httpx
import openai

url, ca, *shown = sys.argv[1:]
context = ssl.create_default_context(cafile=ca)
if shown:
    context.load_cert_chain(*shown)
with openai.OpenAI(
    base_url=f"{url}/v1",
    api_key=os.environ.get("OPENAI_API_KEY", "none"),
    max_retries=0,
    http_client=httpx.Client(verify=context, trust_env=False),
) as client:
    try:
        answer = client.embeddings.create(model="tiny", input="w3 w4", encoding_format="float")
        print(len(answer.data[0].embedding))  # noqa: T201
    except openai.APIConnectionError as error:
        print(f"refused: {error.__cause__}")  # noqa: T201
    except openai.AuthenticationError as error:
        print(f"refused: {error.status_code} {error.code}")  # noqa: T201
