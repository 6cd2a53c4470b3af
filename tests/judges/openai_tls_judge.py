"""Calls the server over TLS with OpenAI's client.

The program runs as `PROGRAM URL CA [CERT KEY]` in the virtual environment of the requirements file clients.txt. The
program prints the dimension of a vector, or the error. The client reads the server's key from the environment variable
OPENAI_API_KEY.
"""

import os
import ssl
import sys

import httpx
import openai

url, ca, *pair = sys.argv[1:]
context = ssl.create_default_context(cafile=ca)
if pair:
    context.load_cert_chain(*pair)
with openai.OpenAI(
    base_url=f"{url}/v1",
    api_key=os.environ.get("OPENAI_API_KEY", "none"),
    max_retries=0,
    http_client=httpx.Client(verify=context, trust_env=False),
) as client:
    try:
        reply = client.embeddings.create(model="tiny", input="w3 w4", encoding_format="float")
        print(len(reply.data[0].embedding))  # noqa: T201
    except openai.APIConnectionError as error:
        print(f"refused: {error.__cause__}")  # noqa: T201
    except openai.AuthenticationError as error:
        print(f"refused: {error.status_code} {error.code}")  # noqa: T201
