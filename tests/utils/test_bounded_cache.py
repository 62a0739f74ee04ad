"""The cache drops what was used least recently, by number or by size."""

from areal.utils.bounded_cache import BoundedCache


def test_value_used_least_recently_is_dropped_first() -> None:
    cache: BoundedCache[str, int] = BoundedCache(2)
    cache.put("a", 1)
    cache.put("b", 2)
    assert cache.get("a") == 1
    cache.put("c", 3)
    assert (cache.get("a"), cache.get("b"), cache.get("c")) == (1, None, 3)
    assert len(cache) == 2


def test_looking_whether_a_key_is_held_does_not_count_as_use() -> None:
    cache: BoundedCache[str, int] = BoundedCache(2)
    cache.put("a", 1)
    cache.put("b", 2)
    assert "a" in cache
    cache.put("c", 3)
    assert "a" not in cache


def test_limit_is_on_the_total_size_of_the_values() -> None:
    cache: BoundedCache[str, bytes] = BoundedCache(10, size=len)
    cache.put("a", b"1234")
    cache.put("b", b"5678")
    cache.put("c", b"9012")
    assert ("a" in cache, "b" in cache, "c" in cache) == (False, True, True)


def test_value_larger_than_the_limit_is_held_alone() -> None:
    cache: BoundedCache[str, bytes] = BoundedCache(3, size=len)
    cache.put("small", b"1")
    cache.put("large", b"123456")
    assert len(cache) == 1
    assert cache.get("large") == b"123456"


def test_cache_with_limit_zero_holds_nothing() -> None:
    cache: BoundedCache[str, int] = BoundedCache(0)
    cache.put("a", 1)
    assert cache.get("a") is None


def test_replaced_dropped_and_cleared_values_no_longer_count() -> None:
    cache: BoundedCache[str, bytes] = BoundedCache(4, size=len)
    cache.put("a", b"1234")
    cache.put("a", b"1")
    cache.put("b", b"123")
    assert "a" in cache
    cache.drop("a")
    cache.drop("a")
    cache.put("c", b"1")
    assert ("b" in cache, "c" in cache) == (True, True)
    cache.clear()
    assert len(cache) == 0
    cache.put("d", b"1234")
    assert "d" in cache
