"""The load generator of `encserve bench`. The programs in bench/ also use it."""
