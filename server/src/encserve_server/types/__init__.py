"""The data that flow through the server: shapes and dtypes stated, and names that say what has been checked."""
