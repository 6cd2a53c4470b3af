"""The callers of the server: keys, certificates, the callers file and rates. Imports no protocol."""
