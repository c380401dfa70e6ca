from polar.store.sql import SCHEMA_VERSION, _translate, load_queries, load_schema


def test_queries_in_both_styles() -> None:
    assert load_queries("named").blob == "SELECT data FROM blobs WHERE digest = :digest"
    assert load_queries("pyformat").blob == "SELECT data FROM blobs WHERE digest = %(digest)s"


def test_comments_are_not_part_of_a_query() -> None:
    assert load_queries("named").end_session.startswith("UPDATE sessions")


def test_percent_signs_and_casts_are_not_parameters() -> None:
    text = "SELECT a::text FROM t WHERE b LIKE '%x' AND c = :c;\n"
    assert _translate(text, "pyformat") == "SELECT a::text FROM t WHERE b LIKE '%%x' AND c = %(c)s"
    assert _translate(text, "named") == "SELECT a::text FROM t WHERE b LIKE '%x' AND c = :c"


def test_the_schema_carries_its_version() -> None:
    assert f"INSERT INTO polar_schema (version) VALUES ({SCHEMA_VERSION})" in load_schema()
