"""Tests of callers files and key files, valid and invalid, and of the token bucket that limits a caller's rate."""

import contextlib
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from encserve_server.__main__ import main
from encserve_server.callers.file import FIELDS, CallersError, read_callers, read_keys
from encserve_server.callers.keys import digest_of
from encserve_server.callers.rates import BURST_SECONDS, TokenBucket
from encserve_server.types.callers import Caller, Priority, dns_name, uri_name

HASH = "ab" * 32
KEY = "encserve-" + "k" * 43  # a fixed key, because the names of the tests contain the key

WHOLE = f"""
[[caller]]
name = "search"
key_sha256 = ["{HASH}", "{"CD" * 32}"]
certificate_names = ["spiffe://example/search", "search.example"]
models = ["all-MiniLM-L6-v2"]
inspect = false
weight = 2
priority = "bulk"
tokens_per_second = 50000
proxy = true

[[caller]]
name = "jobs"
key_sha256 = ["{"00" * 32}"]
"""


def test_every_field_is_read_and_has_a_default() -> None:
    search, jobs = read_callers(WHOLE.encode(), "callers.toml")
    assert search.caller == Caller("search", 2.0, Priority.BULK)
    assert search.digests == (bytes.fromhex(HASH), b"\xcd" * 32)
    assert search.certificate_names == (uri_name("spiffe://example/search"), dns_name("search.example"))
    assert search.models == frozenset({"all-MiniLM-L6-v2"})
    assert (search.may_inspect, search.tokens_per_second, search.is_proxy) == (False, 50_000, True)
    assert (jobs.caller, jobs.certificate_names, jobs.models) == (Caller("jobs"), (), None)
    assert (jobs.may_inspect, jobs.tokens_per_second, jobs.is_proxy) == (True, None, False)


def one(fields: str) -> str:
    return f'[[caller]]\nname = "search"\nkey_sha256 = ["{HASH}"]\n{fields}\n'


WRONG = [
    ("", "has no [[caller]]"),
    ("[caller]\nname = 'search'", "write [[caller]], with two brackets"),
    ("caller = 3", "write [[caller]], with two brackets"),
    ("[callers]", "unknown table callers"),
    ("[[caller]\n", "TOML"),
    ("a = " + "9" * 5000, "TOML"),
    ("[[caller]]\n", "caller[0]: name: must be 1 to 64"),
    ('[[caller]]\nname = ""', "caller[0]: name: must be 1 to 64"),
    ('[[caller]]\nname = "a b"', "caller[0]: name: must be 1 to 64"),
    (f'[[caller]]\nname = "{"a" * 65}"', "caller[0]: name: must be 1 to 64"),
    ('[[caller]]\nname = "search"', 'caller[0] "search": needs key_sha256 or certificate_names'),
    (one(f'key = "{KEY}"'), "unknown field key; the fields are certificate_names, inspect"),
    (
        one("wieght = 2"),
        "unknown field wieght; the fields are certificate_names, inspect, key_sha256, models, name, priority",
    ),
    (one(f'{KEY} = "search"'), f"unknown field of {len(KEY)} characters; the fields are certificate_names"),
    (f'"{KEY}" = "search"', f"unknown table of {len(KEY)} characters; the only table is [[caller]]"),
    (f"[{KEY}]\n[{KEY}]", "TOML: Cannot declare … twice (at line 2"),
    (f'a = {{"{KEY}" = 1, "{KEY}" = 2}}', "TOML: Duplicate inline table key … (at line 1"),
    (KEY, "TOML: Expected '=' after a key"),
    (f'[[caller]]\nname = "search"\nkey_sha256 = ["{KEY}"]', "key_sha256[0]: must be 64 hexadecimal digits"),
    (f'[[caller]]\nname = "search"\nkey_sha256 = "{HASH}"', 'key_sha256: must be a list of strings, as ["…", "…"]'),
    ('[[caller]]\nname = "search"\nkey_sha256 = ["", 5]', "key_sha256[0]: must be 64 hexadecimal digits"),
    (
        one("certificate_names = [5]"),
        "certificate_names[0]: must be a DNS name, or a URI that begins with its scheme such as spiffe://; was",
    ),
    (one('certificate_names = [" "]'), "certificate_names[0]: must be a DNS name, or a URI"),
    (one('certificate_names = ["example.org/jobs"]'), "certificate_names[0]: must be a DNS name, or a URI"),
    (one('certificate_names = ["jobs.example.org:443"]'), "certificate_names[0]: must be a DNS name, or a URI"),
    (one("models = []"), "models: must name at least one model; leave the field out for all"),
    (one("inspect = 1"), "inspect: must be true or false; was 1"),
    (one("proxy = 1"), "proxy: must be true or false; was 1"),
    (one("weight = 0"), "weight: must be from 0.01 to 100; was 0"),
    (one("weight = true"), "weight: must be a number"),
    (one("weight = nan"), "weight: must be a number; was nan"),
    (one('weight = "2"'), "weight: must be a number; was a string"),
    (one('priority = "low"'), "priority: must be interactive or bulk"),
    (one("priority = [1]"), "priority: must be interactive or bulk; was a list"),
    (one("tokens_per_second = 1" + "0" * 400), "tokens_per_second: must be from 1 to 1e+12; was a number of more than"),
    (one("weight = 1" + "0" * 400), "weight: must be from 0.01 to 100; was a number of more than 15 digits"),
    (one("weight = -0x1" + "f" * 5000), "TOML"),
    (one("inspect = 0x1" + "f" * 5000), "inspect: must be true or false; was a number of more than 15 digits"),
    (one("tokens_per_second = inf"), "tokens_per_second: must be a number; was inf"),
    (one("tokens_per_second = 0"), "tokens_per_second: must be from 1 to 1e+12; was 0"),
    (one("") + one(""), "caller[0] and caller[1] have the same name"),
    (one("") + one("").replace("search", "jobs"), "caller[0] and caller[1] have the same key_sha256"),
    (one('certificate_names = ["a", "a"]'), "caller[0] and caller[0] have the same certificate_names"),
    (one('certificate_names = ["a.example", "A.Example"]'), "caller[0] and caller[0] have the same certificate_names"),
]


@pytest.mark.parametrize(("text", "problem"), WRONG)
def test_a_wrong_file_is_named_and_its_keys_are_hidden(text: str, problem: str) -> None:
    with pytest.raises(CallersError) as caught:
        read_callers(text.encode(), "callers.toml")
    assert str(caught.value).startswith("callers.toml: ")
    assert problem in str(caught.value)
    assert KEY not in str(caught.value)
    assert HASH not in str(caught.value)


@given(data=st.binary(max_size=200) | st.text(alphabet='[]caller="\n ,#\\', max_size=60).map(str.encode))
def test_every_wrong_file_raises_a_callers_error(data: bytes) -> None:
    for read in (read_callers, read_keys):
        with contextlib.suppress(CallersError):
            read(data, "it")


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", "has no key"),
        (b"\n \n", "has no key"),
        (b"two words\n", "printable ASCII"),
        ("schlüssel\n".encode(), "printable ASCII"),
        (b"a\x00b", "printable ASCII"),
        (b"k" * 16 + b"\n" + b"l" * 15, "key 2 must have at least 16 characters; has 15"),
        (b"ab\xff", "byte 2"),
    ],
)
def test_a_wrong_file_of_keys(data: bytes, problem: str) -> None:
    read_keys(b"k" * 16, "it")
    with pytest.raises(CallersError, match=problem):
        read_keys(data, "it")


def test_a_file_of_keys_may_begin_with_a_byte_order_mark() -> None:
    assert read_keys(b"\xef\xbb\xbf" + b"k" * 16 + b"\r\n", "it")[0].digests == (digest_of("k" * 16),)


def test_hash_key_makes_a_new_key_and_its_hash() -> None:
    runs = [CliRunner().invoke(main, ["hash-key"]).stdout for _ in range(2)]
    assert runs[0] != runs[1]
    key, key_hash = (line.split()[1] for line in runs[0].splitlines())
    assert len(key) >= 43
    rules = read_callers(f'[[caller]]\nname = "a"\nkey_sha256 = ["{key_hash}"]'.encode(), "it")
    assert rules[0].digests == (digest_of(key),)


# Rates

calls = st.lists(st.tuples(st.floats(0, 3), st.integers(1, 500)), max_size=60)


@given(calls=calls, rate=st.integers(1, 200))
def test_any_period_admits_at_most_its_rate_a_burst_and_one_call(calls: list[tuple[float, int]], rate: int) -> None:
    now, bucket, taken = 0.0, TokenBucket(rate, 0.0), []
    for pause, tokens in calls:
        now += pause
        if not bucket.delay_seconds(now):
            bucket.take(tokens, now)
            taken.append((now, tokens))
    for i, (began, _) in enumerate(taken):
        for j in range(i, len(taken)):
            total = sum(tokens for _, tokens in taken[i:j])  # the tokens of the calls before call j
            assert total <= (taken[j][0] - began + BURST_SECONDS) * rate + 1e-6 * (1 + total)


@given(calls=calls, rate=st.integers(1, 200))
def test_the_delay_is_right(calls: list[tuple[float, int]], rate: int) -> None:
    now, bucket = 0.0, TokenBucket(rate, 0.0)
    for pause, tokens in calls:
        now += pause
        if delay := bucket.delay_seconds(now):
            assert bucket.delay_seconds(now + delay / 2) > 0 or delay <= 2 / rate
            now += delay + 1e-6
            assert not bucket.delay_seconds(now)
        bucket.take(tokens, now)


@given(tokens=st.integers(1, 500), rate=st.integers(1, 200))
def test_returned_tokens_do_not_change_the_bucket(tokens: int, rate: int) -> None:
    bucket = TokenBucket(rate, 0.0)
    bucket.take(tokens, 0.0)
    bucket.take(-tokens, 0.0)
    assert not bucket.delay_seconds(0.0)
    bucket.take(rate, 0.0)
    assert bucket.delay_seconds(0.0) == pytest.approx(1 / rate)


def test_a_change_of_the_rate_keeps_the_debt() -> None:
    bucket = TokenBucket(10, 0.0)
    bucket.take(110, 0.0)
    bucket.change_rate(100, 0.0)
    assert bucket.delay_seconds(0.0) == 1.0


def test_the_example_of_the_docs_is_valid() -> None:
    page = (Path(__file__).parent.parent.parent / "docs/how-to/keys-and-shares.md").read_text()
    search, reports = read_callers(page.partition("```toml\n")[2].partition("```")[0].encode(), "keys-and-shares.md")
    assert (search.digests, reports.digests) == ((digest_of("SEARCH-KEY"),), (digest_of("REPORTS-KEY"),))
    assert all(f"| `{field}` |" in page for field in sorted(FIELDS))
