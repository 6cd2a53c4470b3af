"""Print the errors of single texts, of a wrong model, and of a missing server."""

from encserve_client import EncoderClient, EncserveError, ModelNotFoundError, ServerUnavailableError

with EncoderClient() as client:
    for index, result in client.stream(["a text", "too long " * 10_000, "another text"]):
        print(index, f"error: {result}" if isinstance(result, EncserveError) else result.shape)
    try:
        client.embed("a text", model="no-such-model")
    except ModelNotFoundError as error:
        print("wrong model:", error)
try:
    with EncoderClient("localhost:1") as client:
        client.embed("a text")
except ServerUnavailableError as error:
    print("no server:", error)
