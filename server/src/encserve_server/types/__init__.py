"""The data types of the server, with the shapes and dtypes of arrays."""
