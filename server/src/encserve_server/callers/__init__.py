"""Who may call: keys, certificates, the callers file and rates. Imports no protocol."""
