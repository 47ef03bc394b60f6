from __future__ import annotations

from remat import formats


def test_bytes_in_the_unit_that_reads_best() -> None:
    assert formats.bytes_text(345_100_000) == "329.1 MiB"
    assert formats.bytes_text(8 * 2**30) == "8.00 GiB"
    assert formats.bytes_pair(2**29, 2**30) == "0.50 | 1.00 GiB"
    assert formats.bytes_pair(2**20, None) == "1.00 | - MiB"
    assert formats.bytes_text(3 * 2**10) == "3.0 KiB"
    assert formats.bytes_text(90) == "0.1 KiB"
    assert formats.bytes_text(36) == "36 bytes"
    assert formats.bytes_text(1) == formats.exact_bytes_text(1) == "1 byte"
    assert formats.bytes_text(0) == "0.0 KiB"


def test_times_and_shares() -> None:
    assert formats.time_text(612_345) == "612 ms"
    assert formats.fine_time_text(82.6) == "82.6 us"
    assert formats.fine_time_text(8_600) == "8.6 ms"
    assert formats.time_pair(1_500, 90_000) == "1.5 | 90.0 ms"
    assert formats.percent_text(0.0042) == "0.42 %"
    assert formats.percent_pair(0.123, 0.1) == "12.3 | 10.0 %"
