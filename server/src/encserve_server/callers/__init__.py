"""Who may call: keys and certificates, the callers file, and rates. Knows no protocol."""
