"""The code that JSON routes of several protocols share: it reads bodies, names fields in errors, and writes numbers."""
