"""The code that several JSON protocols share: it reads bodies, names fields in errors, and writes numbers."""
