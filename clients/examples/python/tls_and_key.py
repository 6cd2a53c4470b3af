"""Call a server with TLS and a key. ca.pem has the server's certificate authority, and key.txt has the key."""

from pathlib import Path

from encserve_client import AccessDeniedError, EncoderClient, Tls

key = Path("key.txt").read_text()
try:
    with EncoderClient(tls=Tls(ca="ca.pem"), api_key=key) as client:
        print(client.embed("a secret text").shape)
except AccessDeniedError as error:
    print("refused:", error)
