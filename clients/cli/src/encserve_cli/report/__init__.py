"""The HTML pages of `encserve inspect` and `encserve similarity`, and the numbers that `inspect` prints."""
