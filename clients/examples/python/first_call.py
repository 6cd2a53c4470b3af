"""Print the vector of one text. First run `make serve`, or set ENCSERVE_TARGET to the address of another server."""

from encserve_client import EncoderClient

with EncoderClient() as client:  # the server at ENCSERVE_TARGET, by default localhost:50051
    vector = client.embed("The cat sleeps on the warm windowsill.")  # (d_model,)
    print(vector.shape, vector.dtype, vector[:4])
