import pytest

from diloco.units import (
    format_count,
    format_duration,
    format_rate,
    format_size,
    parse_count,
    parse_duration,
    parse_rate,
)


@pytest.mark.parametrize(
    ("parse", "text", "value"),
    [
        (parse_rate, "20mbit", 20e6),
        (parse_rate, "1.5 Gbit/s", 1.5e9),
        (parse_duration, "80ms", 0.08),
        (parse_duration, "2min", 120.0),
        (parse_duration, 5, 5.0),
        (parse_count, "25M", 25_000_000),
        (parse_count, "1_000", 1000),
        (parse_count, "1e3", 1000),
    ],
)
def test_reads_what_people_write(parse, text, value):
    assert parse(text) == value


@pytest.mark.parametrize(
    ("parse", "text", "complaint"),
    [
        (parse_rate, "20", "unit is missing"),
        (parse_rate, "20mb", "unknown unit 'mb'"),
        (parse_rate, "-1mbit", "such as 20mbit"),
        (parse_duration, "80 parsecs", "unknown unit 'parsecs'"),
        (parse_count, "2.5", "not a whole number"),
        (parse_count, True, "such as 2000 or 25M"),
        (parse_count, float("inf"), "finite"),
        (parse_rate, 7, "unit is missing"),
        (parse_duration, [], "such as 80ms"),
        (parse_duration, "1e306d", "finite"),
        (parse_duration, 10**400, "finite"),
        (parse_rate, "1e300gbit", "finite"),
        (parse_rate, "2e15bit", "from 1bit to 1000tbit"),
        (parse_rate, "1e-300bit", "from 1bit to 1000tbit"),
        (parse_count, "1e300T", "finite"),
        (parse_count, "1e19", "too large: at most 9"),
        (parse_count, 10**400, "too large"),
    ],
)
def test_refuses_the_rest_with_an_example(parse, text, complaint):
    with pytest.raises(ValueError, match=complaint):
        parse(text)


def test_formats_for_reading():
    assert format_count(984_448) == "984k"
    assert format_count(12) == "12"
    assert format_count(999_999) == "1M" and format_size(1_040_000) == "1016 KiB"  # never 1e+03
    assert format_rate(20e6) == "20 mbit/s"
    assert format_size(3 * 2**30) == "3 GiB"
    assert [format_duration(s) for s in (0.44, 48, 185, 7800)] == ["0.4 s", "48 s", "3:05 min", "2:10 h"]
    assert [format_duration(s) for s in (59.4, 59.6, 116, 3599, 3600)] == [
        "59 s",
        "1:00 min",
        "1:56 min",
        "59:59 min",
        "1:00 h",
    ]
